"""Storage of KV outside of HBM: DRAM arenas, SSD volumes, and the index of what they hold."""
