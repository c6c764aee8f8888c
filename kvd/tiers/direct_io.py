"""Whole transfers between a file and memory, past the page cache where the file system allows it.

Direct I/O wants memory, file offset and length in whole sectors. What it refuses (EINVAL) is done
through the page cache instead, by the same descriptor: O_DIRECT can be taken off an open file.

Memory that is aligned for it is each I/O thread's staging buffer. Headers go through that, and
blocks that are packed, sealed or scrubbed: these in pieces of about STAGED_IO_BYTES, so that it
stays small however large a block is.
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
    """Fill buffers, whose sizes are whole sectors, from a file.

    Returns:
        False if the file ends before they are full.

    Raises:
        OSError: the device failed.
    """
    total = sum(map(len, buffers))
    done = 0
    while done < total:
        count = os.preadv(fd, _rest(buffers, done), offset + done)
        # A read may stop anywhere; only from a sector's start may a direct one continue.
        whole = (done + count) // SECTOR_BYTES * SECTOR_BYTES
        if whole == done:
            return False
        done = whole
    return True


def write_fully(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers, whose sizes are whole sectors, to a file.

    Raises:
        OSError: the device failed; ENOSPC also when it takes nothing and does not say why.
    """
    total = sum(map(len, buffers))
    done = 0
    while done < total:
        count = os.pwritev(fd, _rest(buffers, done), offset + done)
        if not count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole = (done + count) // SECTOR_BYTES * SECTOR_BYTES
        done = whole if whole > done else done + count


def probe_direct(directory: Path) -> bool:
    """Whether files of a directory can be read and written past the page cache."""
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
        return error.errno in (errno.ENOSPC, errno.EDQUOT)  # full, which says nothing about direct
    finally:
        os.close(fd)
        Path(name).unlink(missing_ok=True)


def set_direct(fd: int, *, on: bool) -> None:
    """Open or close the way past the page cache.

    Raises:
        OSError: EINVAL where the file system has none.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)


def _rest(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """Return what is left of buffers after `done` bytes."""
    if not done:
        return list(buffers)
    rest: list[memoryview] = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


class Staging:
    """A buffer that grows to the largest piece its thread has met; its pages are allocated then."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Return `num_bytes` of memory with arbitrary contents, good until the next call."""
        if len(self._view) < num_bytes:
            size = align_up(num_bytes, 16 * SECTOR_BYTES)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            memory = mmap.mmap(-1, size, flags=flags)
            exclude_from_dumps(memory)
            self._view = memoryview(memory)
        return self._view[:num_bytes]
