"""A device driver whose device memory is host memory, for engines on a CPU; it shares memfds."""

import mmap
import os

import torch


class HostDriver:
    """See `runtime/cuda/driver.py`; it locks no memory, so that no slot is copied in place."""

    def register(self, address, num_bytes):
        """Do nothing: host memory needs no lock."""

    def unregister(self, address):
        """Do nothing: no memory is locked."""

    def staging(self, num_bytes):
        """Return host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def share(self, num_bytes):
        """Return a memfd, which the stand-in for CUDA's driver can import."""
        fd = os.memfd_create("ring")
        os.ftruncate(fd, max(num_bytes, 2 << 20))
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8), fd
