"""Settings and commands: one file, environment and flags, checked all at once; reload."""
