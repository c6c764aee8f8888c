"""KV between working memory and the arena, layer by layer; and within memory, after a discard.

Source: CachedAttention, sections 3.2 (load and save streams) and 3.4 (decoupled positions).
"""
