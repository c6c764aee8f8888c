"""Calls of tools in answers: the formats in which models write them, and reading these."""
