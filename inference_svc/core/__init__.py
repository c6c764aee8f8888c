"""The service's decisions: scheduling, contexts, truncation, compression, limits.

Pure: no I/O, clock, asyncio or torch. Time is passed in as `now_ns`, effects are returned as values.
"""
