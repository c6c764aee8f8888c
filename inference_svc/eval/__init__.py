"""Quality after a truncation: perplexity and retrieval by ways to truncate, errors of re-embedding.

Measures a model directory in this process, with the runtime that serves: KV, recipes, compaction.
"""
