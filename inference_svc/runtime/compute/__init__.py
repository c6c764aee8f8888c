"""One step: a forward of the model over a ragged batch, and next tokens chosen from its logits."""
