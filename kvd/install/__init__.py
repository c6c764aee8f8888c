"""`kvd install-units`: what systemd needs, put where systemd looks for it."""
