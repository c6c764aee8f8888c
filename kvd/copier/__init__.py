"""The copier of one GPU: a process that kvd starts, and that copies for engines (`cuda_ipc`).

It maps the arenas and locks them for the GPU once, whatever engines come and go; each of them has a
channel, and a ring in the GPU's memory. It can be killed at any time: engines then copy themselves.
"""
