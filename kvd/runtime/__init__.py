"""The cache of one layout at work: the pure core, and threads that move bytes between tiers."""
