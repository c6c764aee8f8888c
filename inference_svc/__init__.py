"""inference_svc: a pure scheduler (`core`) with torch under it (`runtime`) and gRPC over it."""

import shared  # noqa: F401  # before gRPC, whose own log it quiets
