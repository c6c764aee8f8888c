"""kvd, the KV-cache daemon: a pure cache engine (`core`) with asyncio around it. No torch."""

import shared  # noqa: F401  # before gRPC, whose own log it quiets
