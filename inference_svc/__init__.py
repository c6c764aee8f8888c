"""inference_svc: a pure scheduler (`core`) with torch under it (`runtime`) and gRPC over it."""
