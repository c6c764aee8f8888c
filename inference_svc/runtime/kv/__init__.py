"""Working KV: memory, who may touch it when, and copies between it and kvd's arena."""
