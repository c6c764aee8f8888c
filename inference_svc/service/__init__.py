"""How turns come in: the gateway that gRPC and HTTP share, the gRPC servers, and the drain."""
