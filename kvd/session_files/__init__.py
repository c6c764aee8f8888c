"""Session files, which move a session to another kvd: kvd export and import. Bytes: FORMATS.md."""
