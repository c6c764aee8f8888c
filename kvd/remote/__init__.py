"""Sessions in an object store: pushed by one kvd, pulled by another. FORMATS.md has the bytes."""
