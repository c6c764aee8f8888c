"""Values that both processes speak of.

Keys, layout, lineage, errors, units. Pure; imports nothing else of ours.
"""
