"""What the daemon asks of its host: clock, directories, users, memory, systemd."""
