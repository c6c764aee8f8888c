"""kvd top: a live view of a running kvd. `screen` and `views` are pure, `loop` does I/O."""
