"""Working KV: memory in token slots, gates that order access to it, and the arena as tensors.

Tensor shapes are written with these words:

    tokens, capacity_tokens   token slots in use, and all token slots
    kv_heads, heads           heads of keys and values, and of queries (a multiple of kv_heads)
    head_dim, value_dim       elements of a key (and query), and of a value; `dim`: either
    num_slots, block_tokens   slots of the arena, and tokens of a block, which one slot holds
"""
