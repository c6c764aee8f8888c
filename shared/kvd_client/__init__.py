"""An engine's side of kvd: attach, call, map the arena, report the queue (D10, D13)."""
