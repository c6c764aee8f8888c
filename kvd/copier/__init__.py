"""The copier of one GPU: a process that kvd starts, and that copies for engines (`cuda_ipc`).

It maps each arena and locks it for the GPU once, independent of engines that attach and detach.
Each engine has a channel, and a ring in the GPU's memory. The copier can be killed at any time:
engines then copy themselves.
"""
