"""The loop that owns the scheduler, and the jobs, memory and loads it looks after."""
