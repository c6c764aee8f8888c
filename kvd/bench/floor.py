"""The disk's floor: the I/O that kvd does for a pass, with no kvd in the way.

The same extents (header and block in one pwritev or preadv, straight from and to memory, with
O_DIRECT where the file system takes it), in files of the same size, preallocated in the same way
and written once before anything is timed; the same number of threads; the same cadence of
fdatasync: whenever a sync has ended, the next one is begun for all that was written meanwhile. No
checksums, no index, no other process.
"""

import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvd.bench.buffers import BlockAt
from kvd.tiers.io_threads import BatchWorker

MAX_SYNC_BATCH = 64  # extents in one sync; as many are never in flight


class DirectFloor:
    """Extents in preallocated files, moved by `num_threads` threads.

    Args:
        directory: made, if it is not there; on the file system to measure.
        header_bytes, block_bytes: of an extent, whole sectors.
        num_extents: all of them are written and read by a pass.
        segment_bytes: of one file, at most; kvd's ssd.segment_bytes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        header_bytes: int,
        block_bytes: int,
        num_extents: int,
        segment_bytes: int,
        num_threads: int,
    ) -> None:
        self._directory = directory
        self._header_bytes = header_bytes
        self._extent_bytes = header_bytes + block_bytes
        self._num_extents = num_extents
        self._per_segment = max(1, segment_bytes // self._extent_bytes)
        self._num_threads = num_threads
        self._fds: list[int] = []
        self._failed: list[OSError] = []  # in the threads; the first one is raised
        self.is_direct = False

    def open(self) -> None:
        """Make and preallocate the files; raises OSError when the disk is full."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for segment, first in enumerate(range(0, self._num_extents, self._per_segment)):
            num_extents = min(self._per_segment, self._num_extents - first)
            path = self._directory / f"{segment:05}.floor"
            fd, self.is_direct = open_direct(path)
            self._fds.append(fd)
            os.posix_fallocate(fd, 0, num_extents * self._extent_bytes)

    def write(self, block_at: BlockAt) -> None:
        """Write every extent; returns when all of it is durable."""
        syncer: BatchWorker[int] = BatchWorker("bench-sync", self._sync, MAX_SYNC_BATCH)
        syncer.start()

        def write_one(extent: int, header: memoryview) -> None:
            fd, offset = self._place(extent)
            moved = os.pwritev(fd, [header, block_at(extent)], offset)
            self._check(moved)
            syncer.put(fd)

        try:
            self._on_threads(write_one)
        finally:
            syncer.close()  # syncs what is left
        if self._failed:
            raise self._failed[0]

    def read(self, block_at: BlockAt) -> None:
        """Read every extent."""

        def read_one(extent: int, header: memoryview) -> None:
            fd, offset = self._place(extent)
            self._check(os.preadv(fd, [header, block_at(extent)], offset))

        self._on_threads(read_one)

    def close(self) -> None:
        """Close the files and remove them."""
        while self._fds:
            os.close(self._fds.pop())
        for path in self._directory.glob("*.floor"):
            path.unlink()

    def _on_threads(self, move: Callable[[int, memoryview], None]) -> None:
        """Give extent after extent to whichever thread is free."""
        extents = itertools.count()

        def work(_thread: int) -> None:
            header = memoryview(mmap.mmap(-1, self._header_bytes))
            header[:] = bytes(self._header_bytes)
            while (extent := next(extents)) < self._num_extents:
                move(extent, header)

        with ThreadPoolExecutor(self._num_threads, "bench-io") as pool:
            for _ in pool.map(work, range(self._num_threads)):
                pass

    def _place(self, extent: int) -> tuple[int, int]:
        segment, index = divmod(extent, self._per_segment)
        return self._fds[segment], index * self._extent_bytes

    def _check(self, moved_bytes: int) -> None:
        if moved_bytes != self._extent_bytes:
            raise OSError(errno.EIO, f"{moved_bytes} bytes moved", str(self._directory))

    def _sync(self, written: Iterable[int]) -> None:
        for fd in set(written):
            try:
                os.fdatasync(fd)
            except OSError as error:
                self._failed.append(error)


def open_direct(path: Path) -> tuple[int, bool]:
    """Create a file for direct I/O; (descriptor, whether the file system takes it)."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
