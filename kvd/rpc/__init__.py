"""The gRPC services of kvd: guarded, narrowed to tenants, decoded."""
