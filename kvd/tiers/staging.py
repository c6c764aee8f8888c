"""Memory of one I/O thread, aligned for direct I/O.

Headers go through it, and blocks that are packed or scrubbed: these in pieces of about
STAGED_IO_BYTES, so that it stays small however large a block is.
"""

import mmap

from shared.process.dumps import leave_out
from shared.types.units import SECTOR_BYTES, align_up

STAGED_IO_BYTES = 4 << 20


class Staging:
    """A buffer that grows to the largest piece its thread has met; its pages are allocated then."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """`num_bytes` of memory with arbitrary contents, good until the next call."""
        if len(self._view) < num_bytes:
            size = align_up(num_bytes, 16 * SECTOR_BYTES)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            memory = mmap.mmap(-1, size, flags=flags)
            leave_out(memory)
            self._view = memoryview(memory)
        return self._view[:num_bytes]
