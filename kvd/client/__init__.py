"""An operator's side of kvd: where it listens, and calling it."""
