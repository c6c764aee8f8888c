"""A process and its host: logs, runtime directory, systemd, core dumps, memory, packets."""
