"""kvd install-units: the files that systemd, shells and man need, and where they go."""
