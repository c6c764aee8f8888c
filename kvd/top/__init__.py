"""kvd top: what a kvd does, live. `screen` and `views` are pure, `loop` is not."""
