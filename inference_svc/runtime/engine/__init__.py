"""The engine loop, which runs the scheduler, and the requests, steps, loads and discards."""
