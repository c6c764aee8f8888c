"""What the daemon asks of its host: clock, directories, processes, systemd."""
