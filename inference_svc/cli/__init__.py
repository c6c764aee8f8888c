"""The `inference-svc` command, and its client of a running service."""
