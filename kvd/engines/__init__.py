"""Inference engines: the data socket, attachments and quarantine, and copiers of GPUs."""
