"""One step: a forward of the model over a ragged batch, attention, the next tokens."""
