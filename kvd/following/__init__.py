"""kvd remote follow: beside a running kvd, moves its sessions to a remote store and from it."""
