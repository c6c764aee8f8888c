"""What engines and operators ask for: load, store, discard, compact, erase, scrub, export."""
