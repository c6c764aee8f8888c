"""Encryption of what is stored: sealing, files of keys.

sealing     AES-256-GCM, each thing under a key of its own
key_file    a key in a file, or in a credential of systemd
sealer      whole values, sealed by the newest of some keys
"""
