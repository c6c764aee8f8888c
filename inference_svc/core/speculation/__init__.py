"""Drafts: which tokens are likely to come next in an answer, and how many of them to try."""
