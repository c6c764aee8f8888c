"""kvd's gRPC services, calls without gRPC, access control of callers, and replicas of queues."""
