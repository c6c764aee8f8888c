"""The values that enter and leave the core.

Records of the index and the journal, actions, answers and errors. The lowest floor of the core.
"""
