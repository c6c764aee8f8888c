"""Encryption at rest: sealing, and files of keys.

sealing     AES-256-GCM, each thing under a key of its own
key_file    a key in a file, or in a credential of systemd
sealer      whole values, sealed by the newest of several keys
"""
