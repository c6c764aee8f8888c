"""kvd remote follow: a process beside kvd that moves its sessions to and from a remote store."""
