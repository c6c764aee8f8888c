"""Encryption of the SSD tier: the tenants' keys, wrapped by the master key of a file."""
