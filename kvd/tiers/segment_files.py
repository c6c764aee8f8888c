"""The files of one volume: segments, allocated as extents in them are first written.

    <state>/volumes/<layout fingerprint>/volume.id
                                         00000.segment
                                         00001.segment

Each grows in steps to extents_per_segment whole extents. A step is a fraction of what the budget
has left, so that of several volumes none takes all before it needs it. Descriptors are opened once
and kept. Nothing here deletes a file because reading it failed.

Invariant: all volumes share a space budget and ask it before they allocate, so that their sum never
exceeds it, and a reserve of the file system stays free for the index and for others.

Threads: any number, except shrink() and close(), which no I/O may run beside.
"""

import contextlib
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kvd.tiers.direct_io import probe_direct, set_direct
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.volume_identity import identify, remove_volume, sync_directory
from shared.process.log import get_logger

_STEP = 8  # a segment grows by this part of the free budget at a time
_WITHOUT_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL}

log = get_logger(__name__)


class SpaceBudget:
    """What all volumes together may allocate, and what the file system has left; for any thread.

    Args:
        total_bytes: most bytes of allocated segments; None: only the file system is the limit.
        reserve_bytes: bytes of the file system to be left free.
        directory: directory on that file system; it may not exist yet.
    """

    def __init__(self, total_bytes: int | None, reserve_bytes: int, directory: Path) -> None:
        self.total_bytes = total_bytes
        self._reserve_bytes = reserve_bytes
        self._directory = directory
        self._allocated_bytes = 0
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the segments of all volumes."""
        return self._allocated_bytes

    def free_bytes(self) -> int:
        """Return what could still be allocated; negative when the budget was made smaller."""
        free = max(0, self._file_system_bytes() - self._reserve_bytes)
        if self.total_bytes is None:
            return free
        return min(free, self.total_bytes - self._allocated_bytes)

    def reserve(self, least: int, wanted: int, unit: int) -> int:
        """Take between `least` and `wanted` bytes for a segment.

        Returns:
            Bytes taken: whole units, or 0 if not even `least` is left.
        """
        with self._lock:
            granted = min(wanted, self.free_bytes() // unit * unit)
            if granted < least:
                return 0
            self._allocated_bytes += granted
            return granted

    def add_existing(self, num_bytes: int) -> None:
        """Count a segment that was found."""
        with self._lock:
            self._allocated_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Return space that was not allocated after all, or of a segment that is removed."""
        with self._lock:
            self._allocated_bytes -= num_bytes

    def _file_system_bytes(self) -> int:
        paths = (self._directory, *self._directory.parents)
        try:
            status = os.statvfs(next(path for path in paths if path.exists()))
        except OSError:  # a disk that fails, or that we may not look at, takes nothing
            return 0
        return status.f_bavail * status.f_frsize


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume as it is.

    Attributes:
        is_direct: whether its files are read and written with O_DIRECT.
        buffered_reason: why not; "" when direct.
        physical_bytes: what its files take up on the file system.
    """

    is_direct: bool
    buffered_reason: str
    physical_bytes: int


class SegmentFiles:
    """See the module docstring.

    Args:
        directory: the volume's directory.
        extent_bytes: the size of a whole extent.
        extents_per_segment: fixed for the volume's life.
        budget: what all volumes may take together.
        direct: "auto" and "on" read and write past the page cache if the file system lets us; it is
            worth a warning when it does not with "on". "off" does not try.
        faults: faults that tests inject, see kvd/tiers/faults.py.

    Attributes:
        extents_per_segment, faults: see above.
        is_direct: whether reads and writes go past the page cache.
        buffered_reason: why they do not; "" when direct.
    """

    def __init__(
        self,
        directory: Path,
        extent_bytes: int,
        extents_per_segment: int,
        budget: SpaceBudget,
        direct: str,
        faults: Faults,
    ) -> None:
        self._directory = directory
        self._extent_bytes = extent_bytes
        self.extents_per_segment = extents_per_segment
        self._full_bytes = extent_bytes * extents_per_segment
        self._budget = budget
        self._direct = direct
        self.faults = faults
        self._fds: dict[int, int] = {}  # segment → descriptor
        self._sizes: dict[int, int] = {}  # segment → allocated bytes, whole extents
        self._growing: dict[int, int] = {}  # segment → bytes that are being allocated for it
        self._lock = threading.Lock()  # guards both
        self.is_direct = False
        self.buffered_reason = "it is switched off"

    @property
    def reserved_bytes(self) -> int:
        """Of all segments, as the budget counts them."""
        return sum(tuple(self._sizes.values())) + sum(tuple(self._growing.values()))

    @property
    def allocated_bytes(self) -> int:
        """What the file system says that the segments take."""
        num_blocks = 0
        for segment in tuple(self._sizes):
            with contextlib.suppress(OSError):  # somebody removed it
                num_blocks += self._path(segment).stat().st_blocks
        return num_blocks * 512

    def physical_extents(self) -> int:
        """Return how many extents there is space for: allocated, or as budget and disk allow."""
        num_bytes = self.reserved_bytes + self._budget.free_bytes()
        return max(0, num_bytes // self._extent_bytes)

    def info(self) -> VolumeInfo:
        """Return the volume as it is, for operators."""
        return VolumeInfo(self.is_direct, self.buffered_reason, self.allocated_bytes)

    def open(self, expected_id: str = "", *, holds_rows: bool = False) -> str:
        """Find the volume, see whether direct I/O works, count the segments that are there.

        Args, Returns, Raises: see identify().
        """
        volume_id = identify(self._directory, expected_id, self.faults, holds_rows=holds_rows)
        if self._direct != "off":
            self.is_direct = probe_direct(self._directory)
            self._use_buffered("" if self.is_direct else "its file system has no direct I/O")
        for path in self._directory.glob("*.segment"):
            if path.stem.isdigit():
                size = path.stat().st_size // self._extent_bytes * self._extent_bytes
                self._sizes[int(path.stem)] = min(size, self._full_bytes)
        self._budget.add_existing(self.reserved_bytes)
        return volume_id

    def size_of(self, segment: int) -> int:
        """Return the bytes of a segment, in whole extents, if it can be opened; 0: it is not there.

        Raises:
            OSError: the segment cannot be opened.
        """
        size = self._sizes.get(segment, 0)
        if size:
            self.for_reading(segment)
        return size

    def for_reading(self, segment: int) -> int:
        """Return the descriptor of a segment.

        Raises:
            FileNotFoundError: the segment does not exist.
            OSError: the segment cannot be opened.
        """
        fd = self._fds.get(segment)
        return self._open(segment) if fd is None else fd

    def for_writing(self, segment: int, end: int) -> int:
        """Return the descriptor of a segment whose first `end` bytes are allocated.

        Raises:
            OSError: ENOSPC if the budget or the file system is exhausted.
        """
        fd = self._fds.get(segment)
        if fd is not None and self._sizes.get(segment, 0) >= end:
            return fd
        with self._lock:
            if self._sizes.get(segment, 0) < end:
                self._allocate(segment, end)
        return self.for_reading(segment)

    def disable_direct(self, why: str) -> bool:
        """Stop using direct I/O; False if it was not used any more."""
        with self._lock:
            if not self.is_direct:
                return False
            self.is_direct = False
            for fd in self._fds.values():
                set_direct(fd, on=False)
        self._use_buffered(why)
        return True

    def shrink(self, num_extents: int) -> None:
        """Release the space of every extent from `num_extents` on; none of them is in use.

        Raises:
            OSError: the file system refuses.
        """
        for segment in sorted(self._sizes):
            keep = max(0, num_extents * self._extent_bytes - segment * self._full_bytes)
            size = self._sizes[segment]
            if keep >= size:
                continue
            if keep:
                os.truncate(self._path(segment), keep)
                self._sizes[segment] = keep
            else:
                self._path(segment).unlink()
                del self._sizes[segment]
                if segment in self._fds:
                    os.close(self._fds.pop(segment))
            self._budget.release(size - keep)
            self.faults.reach(WritePoint.SEGMENT_REMOVED)

    def close(self) -> None:
        """Close the files."""
        self._budget.release(self.reserved_bytes)
        self._sizes.clear()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def remove(self) -> None:
        """Remove the directory; segments that are still there stay, and it with them."""
        with contextlib.suppress(OSError):
            remove_volume(self._directory)

    def _open(self, segment: int) -> int:
        with self._lock:
            if segment not in self._fds:
                fd = os.open(self._path(segment), os.O_RDWR | os.O_CLOEXEC)
                try:
                    set_direct(fd, on=self.is_direct)
                except OSError:
                    os.close(fd)
                    raise
                self._fds[segment] = fd
            return self._fds[segment]

    def _allocate(self, segment: int, end: int) -> None:
        """Allocate a segment up to `end` or beyond, so that no write finds the disk full."""
        had = self._sizes.get(segment, 0)
        step = max(0, self._budget.free_bytes()) // _STEP // self._extent_bytes * self._extent_bytes
        for wanted in (min(self._full_bytes, end + step), end):
            granted = self._budget.reserve(end - had, wanted - had, self._extent_bytes)
            if not granted:
                break
            self._growing[segment] = granted  # else there would seem to be less room meanwhile
            try:
                self._extend(segment, had, had + granted)
            except OSError as error:
                self._budget.release(granted)
                if error.errno != errno.ENOSPC or wanted == end:
                    raise
            else:
                self._sizes[segment] = had + granted
                return
            finally:
                del self._growing[segment]
        raise OSError(errno.ENOSPC, "the SSD tier has no space for another segment")

    def _extend(self, segment: int, had: int, size: int) -> None:
        # Not by the kept descriptor: where fallocate is emulated it writes single bytes.
        fd = os.open(self._path(segment), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.faults.reach(WritePoint.SEGMENT_CREATED)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _WITHOUT_FALLOCATE:
                    raise
                os.ftruncate(fd, size)  # a write may find the disk full
            self.faults.fsync(fd)
            sync_directory(self._directory, self.faults)
            self.faults.reach(WritePoint.SEGMENT_ALLOCATED)
        except OSError:
            os.ftruncate(fd, had)  # a failed fallocate keeps what it took
            raise
        finally:
            os.close(fd)

    def _path(self, segment: int) -> Path:
        return self._directory / f"{segment:05}.segment"

    def _use_buffered(self, why: str) -> None:
        self.buffered_reason = why
        if why:
            report = log.warning if self._direct == "on" else log.info
            report("ssd_buffered", directory=str(self._directory), reason=why)
