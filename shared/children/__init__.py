"""Child processes that a command starts and ends, such as a kvd of its own."""
