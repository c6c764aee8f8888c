"""Sessions as files that another kvd takes in: kvd export, kvd import. FORMATS.md has the bytes."""
