"""Engines: the data socket that they connect to, and which are attached or quarantined."""
