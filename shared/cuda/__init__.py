"""Calls of CUDA's driver that both processes make: host memory, copies, memory that is shared.

Without torch: a kvd has none. The package `cuda-bindings` makes the calls (extra `[cuda]`).
"""
