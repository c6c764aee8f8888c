"""kvd doctor: what on this machine stands in kvd's way, and what to do about it."""
