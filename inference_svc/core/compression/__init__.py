"""Compression: policies that name the tokens of a context that may go once a turn is over."""
