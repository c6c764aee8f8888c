"""What the next step does: who is admitted, started, preempted, and on which token slots."""
