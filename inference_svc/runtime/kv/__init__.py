"""Working KV: memory in token slots, who may touch it when, and the arena as tensors.

Wherever a shape is named, it is by these words:

    tokens, capacity_tokens   token slots in use, and all there are
    kv_heads, heads           heads of keys and values, and of queries: a multiple
    head_dim, value_dim       elements of a key (and query) and of a value; `dim`: either
    num_slots, block_tokens   slots of the arena, and tokens of a block, which a slot holds
"""
