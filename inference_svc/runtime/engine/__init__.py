"""The loop that owns the scheduler, and the requests, memory and loads it looks after."""
