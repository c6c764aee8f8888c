"""Drafts: which tokens an answer is likely to go on with, and how many of them to try."""
