"""Host services for the daemon: clock, directories, sockets, processes, shared memory, pacing."""
