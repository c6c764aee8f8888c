"""Rotary embedding compiled to tables, and the recipes by which a model's KV is stored."""
