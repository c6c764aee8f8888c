"""A model directory becomes a model that is driven through its hooks, proved right, or refused."""
