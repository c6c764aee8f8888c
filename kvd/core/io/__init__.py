"""What is read and written when, and where it goes: placement, prefetching, demotion, hashes."""
