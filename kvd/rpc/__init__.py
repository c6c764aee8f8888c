"""kvd's gRPC services, access control of their callers, and replicas of engines' queues."""
