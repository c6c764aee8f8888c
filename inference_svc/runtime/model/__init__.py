"""Model loading: a model directory becomes a model that runs through our hooks, or is refused."""
