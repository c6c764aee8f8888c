"""From the index and the arena back to a cache, after a restart."""
