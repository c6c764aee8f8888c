"""Recovery after a restart: from the index and the arena back to a cache."""
