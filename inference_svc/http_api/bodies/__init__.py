"""Bodies of requests: the members that the APIs have in common, and how they are checked."""
