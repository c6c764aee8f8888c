"""Rotary positions: recipes, tables, rotation and its inverse (paper section 3.4)."""
