"""Reading, writing, verifying and prefetching blocks, and making room for them."""
