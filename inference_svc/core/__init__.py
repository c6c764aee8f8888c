"""What the service decides: scheduling, contexts, truncation, compression, limits.

Pure: no I/O, clock, asyncio or torch. Time arrives as `now_ns`, effects leave as values.
"""
