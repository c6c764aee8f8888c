"""The service's decisions: scheduling, contexts, truncation, compression, limits.

Pure: no I/O, clock, asyncio or torch. Time is passed as `now_ns`, effects are returned as values.
"""
