"""A model directory becomes a model driven through its hooks, or is refused with a reason."""
