"""Values that both processes share: keys, layout, lineage, changes of the queue, errors, units.

Pure; imports nothing else of ours.
"""
