"""Memory for the bench: page-aligned, every page allocated and random before anything is timed."""

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from kvd.tiers.page_advice import ask_huge_pages, populate
from shared.types.units import SECTOR_BYTES, align_up

_FILL_BYTES = 8 << 20

BlockAt: TypeAlias = Callable[[int], memoryview]  # block number → its memory

# What the pages are matters as much as who copies: direct I/O into huge pages, or into pages that
# happen to lie side by side, is up to twice as fast. private: as a process gets them. huge: the
# same, with transparent huge pages. shared: as kvd's arena has them without reserved huge pages, a
# memfd with the same advice, allocated in the same way.
Pages = Literal["private", "huge", "shared"]


class Buffer:
    """`num_blocks` blocks of random bytes: neither a disk nor a file system can shrink them."""

    def __init__(self, num_blocks: int, block_bytes: int, pages: Pages = "private") -> None:
        self._block_bytes = block_bytes
        size = align_up(num_blocks * block_bytes, SECTOR_BYTES)
        memory = _shared(size) if pages == "shared" else _private(size)
        self._view = memoryview(memory)
        if pages != "private":
            with contextlib.suppress(OSError):  # a kernel without them gives what it has
                ask_huge_pages(self._view)
                populate(self._view)
        random = np.random.default_rng(0)
        for start in range(0, size, _FILL_BYTES):  # which allocates every page
            part = self._view[start : start + _FILL_BYTES]
            part[:] = random.bytes(len(part))

    def block(self, index: int) -> memoryview:
        """Writable memory of one block."""
        start = index * self._block_bytes
        return self._view[start : start + self._block_bytes]


def _private(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _shared(size: int) -> mmap.mmap:
    fd = os.memfd_create("kvd-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)
