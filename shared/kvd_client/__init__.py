"""An engine's client of kvd: attachment, calls, mapped arena, queue reports (D10, D13)."""
