"""kvd's gRPC services, who may call what of them, and a replica of each engine's queue."""
