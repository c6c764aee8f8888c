"""Where KV bytes lie outside HBM: DRAM arena, SSD segments, and the index that finds them again."""
