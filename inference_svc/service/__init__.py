"""The way in for turns: the gateway that gRPC and HTTP share, gRPC itself, the drain at the end."""
