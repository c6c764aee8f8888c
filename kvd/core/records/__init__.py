"""The values that the core takes and gives.

Records of the index, actions, errors. The lowest floor.
"""
