"""What a process says and asks of its host: logs, runtime directory, systemd, dumps, memory."""
