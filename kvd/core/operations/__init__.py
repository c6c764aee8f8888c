"""Operations of engines and operators: load, store, discard, compact, erase, scrub, export."""
