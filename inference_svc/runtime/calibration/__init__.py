"""What is found out about a model at load: layers, rotations, masks, sinks; proven before use."""
