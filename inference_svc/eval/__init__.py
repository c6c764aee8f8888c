"""Quality after a truncation, a compression or an edit: perplexity, retrieval, errors of keys.

Measures a model directory in this process, with the serving runtime: KV, recipes, compaction.
"""
