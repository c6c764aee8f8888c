"""Calibration of a model at load: its layers, rotations, masks and sinks, proven before use."""
