"""kvd's gRPC services, engines' calls without gRPC, access control of callers, and queue replicas."""
