"""When blocks are read, written and verified, prefetched too; and how room is made for them."""
