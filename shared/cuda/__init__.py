"""Calls of CUDA's driver that both processes make: host memory, copies, shared GPU memory.

They do not need torch, which kvd does not have. The package `cuda-bindings` makes the calls (extra
`[cuda]`).
"""
