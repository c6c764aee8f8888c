"""kvd, the KV-cache daemon: a pure cache engine (`core`) with asyncio around it. No torch."""
