"""The scheduler: which requests are admitted, computed and preempted, and their token slots."""
