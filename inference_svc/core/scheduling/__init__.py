"""What the next step does: who is admitted, started, preempted, and with which rows."""
