"""Attached engines: data socket, holders of slots, their processes."""
