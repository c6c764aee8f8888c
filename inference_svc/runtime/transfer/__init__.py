"""KV between working memory and the arena, layer by layer.

Load, store, compaction in place (paper section 3.2).
"""
