"""Values that both processes speak of: keys, layout, lineage, the queue's changes, errors, units.

Pure; imports nothing else of ours.
"""
