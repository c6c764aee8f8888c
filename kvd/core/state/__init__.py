"""The tables of one cache, each with the transitions that keep it whole.

Sessions, blocks, slots, extents, leases.
"""
