"""The `inference-svc` command: what it asks a running service, and how it shows the answers."""
