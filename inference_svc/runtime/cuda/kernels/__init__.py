"""Kernels in Triton: its language, and nothing else. What launches them is one floor up."""
