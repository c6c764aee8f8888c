"""Processes of ours that a command starts for itself, and ends: kvd among them."""
