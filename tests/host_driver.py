"""A device's driver in the memory of the host, for engines on a CPU: what it shares is a memfd."""

import mmap
import os

import torch


class HostDriver:
    """See `runtime/cuda/driver.py`; it locks nothing, so that nothing is copied in place."""

    def register(self, address, num_bytes):
        """Nothing need be locked."""

    def unregister(self, address):
        """Nothing was."""

    def staging(self, num_bytes):
        """Memory of the host."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def share(self, num_bytes):
        """Memory of a file, which the stand-in for CUDA's driver imports."""
        fd = os.memfd_create("ring")
        os.ftruncate(fd, max(num_bytes, 2 << 20))
        return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8), fd
