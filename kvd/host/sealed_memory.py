"""Sealed memfds: shared memory that no process can resize under another one (SIGBUS)."""

import fcntl
import os

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memfd(name: str, num_bytes: int, flags: int = 0) -> int:
    """Create a memfd that cannot be resized. It takes memory only as its pages are used."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def is_sealed(fd: int) -> bool:
    """Whether a descriptor is a memfd that cannot be resized."""
    required = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & required == required
    except OSError:  # not a memfd
        return False
