"""The loop that owns the scheduler, and the requests, steps, loads and discards it looks after."""
