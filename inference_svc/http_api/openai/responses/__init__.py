"""Responses: turns with ids of their own, their input, and the objects that show them."""
