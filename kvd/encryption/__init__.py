"""Encryption of what lies on SSD: the tenants' keys, wrapped by the key of a file."""
