"""Complete reads and writes of files, with direct I/O where the file system supports it.

Direct I/O bypasses the page cache. It needs memory, file offset and length in whole sectors. When
the file system refuses a transfer (EINVAL), it is repeated through the page cache with the same
descriptor: O_DIRECT can be removed from an open file.

Each I/O thread has a staging buffer, which is aligned for direct I/O. Headers go through it, and
blocks that are packed, sealed or scrubbed. These are moved in pieces of about STAGED_IO_BYTES, so
that the buffer stays small for blocks of any size.
"""

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shared.process.dumps import exclude_from_dumps
from shared.types.units import SECTOR_BYTES, align_up

STAGED_IO_BYTES = 4 << 20


def read_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> bool:
    """Fill buffers, whose sizes are whole sectors, from a file; blocks.

    Returns:
        False if the file ends before the buffers are full.

    Raises:
        OSError: the device failed.
    """
    total = sum(map(len, buffers))
    done = 0
    while done < total:
        count = os.preadv(fd, _remaining(buffers, done), offset + done)
        # A read may stop anywhere, but a direct read may continue only at a sector's start.
        whole = (done + count) // SECTOR_BYTES * SECTOR_BYTES
        if whole == done:
            return False
        done = whole
    return True


def write_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers, whose sizes are whole sectors, to a file; blocks.

    Raises:
        OSError: the device failed. ENOSPC also if a write takes no byte and gives no reason.
    """
    total = sum(map(len, buffers))
    done = 0
    while done < total:
        count = os.pwritev(fd, _remaining(buffers, done), offset + done)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole = (done + count) // SECTOR_BYTES * SECTOR_BYTES
        done = whole if whole > done else done + count


def probe_direct(directory: Path) -> bool:
    """Whether files in a directory can be read and written with direct I/O."""
    try:
        fd, name = tempfile.mkstemp(prefix="probe-", dir=directory)
    except OSError:
        return False
    sector = memoryview(mmap.mmap(-1, SECTOR_BYTES))
    try:
        set_direct(fd, on=True)
        write_fully(fd, [sector], 0)
        return read_fully(fd, [sector], 0)
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # a full disk may still have direct I/O
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)


def set_direct(fd: int, *, on: bool) -> None:
    """Turn direct I/O on or off for an open file.

    Raises:
        OSError: EINVAL where the file system does not support it.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def _remaining(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return the parts of buffers behind their first `done` bytes."""
    if not done:
        return list(buffers)
    remaining: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            remaining.append(buffer[done:])
        done = max(0, done - len(buffer))
    return remaining


class Staging:
    """A thread's buffer for I/O, which grows to the largest piece that was requested."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of memory with arbitrary contents, valid until the next call."""
        if len(self._view) < num_bytes:
            size = align_up(num_bytes, 16 * SECTOR_BYTES)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            memory = mmap.mmap(-1, size, flags=flags)
            exclude_from_dumps(memory)
            self._view = memoryview(memory)
        return self._view[:num_bytes]
