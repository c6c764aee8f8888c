"""Triton kernels only; the package above has the code that launches them."""
