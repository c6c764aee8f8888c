"""One cache at work: the pure core, and the threads that move bytes between its tiers."""
