"""Eviction: the order in which sessions go, from queues and policies; and when they expire."""
