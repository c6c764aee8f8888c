"""Encryption of what lies on SSD: sealing, the tenants' keys, the file of the key above them."""
