"""How messages of kvd are shown to people: shared by `kvd` and `kvd top`."""
