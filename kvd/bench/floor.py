"""The floor: memory, memcpy on threads, and the disk I/O of a pass of kvd, without kvd.

The disk I/O moves the same extents (header and block in one pwritev or preadv, directly from and to
memory, with O_DIRECT if the file system supports it), in files of the same size, preallocated in
the same way and written once before anything is timed. It has the same number of threads and the
same cadence of fdatasync: when a sync has ended, the next one begins for all that was written
meanwhile. There are no checksums, no index, no other process.

Memory is page-aligned. Every page of it is allocated, and has random bytes, before anything is
timed.
"""

import asyncio
import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from kvd.tiers.io_threads import BatchWorker
from kvd.tiers.page_advice import ask_huge_pages, populate
from shared.types.units import SECTOR_BYTES, align_up, ceil_div

_FILL_BYTES = 8 << 20

BlockAt: TypeAlias = Callable[[int], memoryview]  # returns the memory of a block

# The kind of pages matters as much as the copying code: direct I/O into huge pages, or into pages
# that happen to be contiguous, is up to twice as fast. private: as a process gets them. huge: the
# same, with transparent huge pages. shared: as in kvd's arena without reserved huge pages: a memfd
# with the same advice, allocated in the same way.
Pages = Literal["private", "huge", "shared"]


class Buffer:
    """`num_blocks` blocks of random bytes, which no disk or file system can compress."""

    def __init__(self, num_blocks: int, block_bytes: int, pages: Pages = "private") -> None:
        self._block_bytes = block_bytes
        size = align_up(num_blocks * block_bytes, SECTOR_BYTES)
        memory = _shared(size) if pages == "shared" else _private(size)
        self._view = memoryview(memory)
        if pages != "private":
            with contextlib.suppress(OSError):  # a kernel without them gives normal pages
                ask_huge_pages(self._view)
                populate(self._view)
        random = np.random.default_rng(0)
        for start in range(0, size, _FILL_BYTES):  # allocates every page
            part = self._view[start : start + _FILL_BYTES]
            part[:] = random.bytes(len(part))

    def block(self, index: int) -> memoryview:
        """Return the writable memory of one block."""
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


class Copier:
    """Copies blocks, slice by slice; each thread copies a contiguous run of blocks.

    Invariant: the work per slice is the same whatever memory is behind the blocks, so that two
    copies differ only in that memory.
    """

    def __init__(self, num_threads: int, block_bytes: int, slice_bytes: int) -> None:
        self.num_threads = num_threads
        self._block_bytes = block_bytes
        self._slice_bytes = slice_bytes
        self._pool = ThreadPoolExecutor(num_threads, "bench-copy")

    async def copy(self, target: BlockAt, source: BlockAt, num_blocks: int) -> None:
        """Copy blocks 0 … num_blocks - 1; return when all threads are done."""
        loop = asyncio.get_running_loop()
        share = ceil_div(num_blocks, self.num_threads)
        starts = range(0, num_blocks, share)
        runs = [range(start, min(start + share, num_blocks)) for start in starts]
        copies = [
            loop.run_in_executor(self._pool, self._copy_run, target, source, run) for run in runs
        ]
        await asyncio.gather(*copies)

    def _copy_run(self, target: BlockAt, source: BlockAt, run: range) -> None:
        for index in run:
            to = np.frombuffer(target(index), np.uint8)
            from_ = np.frombuffer(source(index), np.uint8)
            for start in range(0, self._block_bytes, self._slice_bytes):
                end = start + self._slice_bytes
                np.copyto(to[start:end], from_[start:end])  # a memcpy, without the GIL

    def close(self) -> None:
        """Stop the threads; wait for their current copies."""
        self._pool.shutdown(wait=True, cancel_futures=True)


MAX_SYNC_BATCH = 64  # extents in one sync; fewer are in flight at any time


class DirectFloor:
    """Writes and reads extents in preallocated files, with `num_threads` threads.

    Args:
        directory: on the file system to measure; created if it does not exist.
        header_bytes, block_bytes: sizes of an extent's two parts, whole sectors.
        num_extents: extents that a pass writes or reads, which is all of them.
        segment_bytes: the largest size of a file; kvd's ssd.segment_bytes.
        num_threads: threads that do I/O.
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
        self._failed: list[OSError] = []  # of syncs in a thread; the first one is raised
        self.is_direct = False

    def open(self) -> None:
        """Create and preallocate the files; raises OSError when the disk is full."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for segment, first in enumerate(range(0, self._num_extents, self._per_segment)):
            num_extents = min(self._per_segment, self._num_extents - first)
            path = self._directory / f"{segment:05}.floor"
            fd, self.is_direct = open_direct(path)
            self._fds.append(fd)
            os.posix_fallocate(fd, 0, num_extents * self._extent_bytes)

    def write(self, block_at: BlockAt) -> None:
        """Write every extent; return when all are durable."""
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
            syncer.close()  # syncs the remaining extents
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
        """Move each extent in the next free thread."""
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
            raise OSError(
                errno.EIO, f"a transfer moved only {moved_bytes} bytes", str(self._directory)
            )

    def _sync(self, written: Iterable[int]) -> None:
        for fd in set(written):
            try:
                os.fdatasync(fd)
            except OSError as error:
                self._failed.append(error)


def open_direct(path: Path) -> tuple[int, bool]:
    """Create a file for direct I/O; return its descriptor, and whether that is supported."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False
