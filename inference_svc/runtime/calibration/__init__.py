"""What is found out about a model at load.

Recipes of its layers, rotations, masks, sinks; proven before use.
"""
