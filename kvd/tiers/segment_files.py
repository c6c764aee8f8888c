"""The files of one volume: segments, which are allocated as their extents are first written.

    <state>/volumes/<layout fingerprint>/volume.id
                                         00000.segment
                                         00001.segment

Each segment grows in steps to extents_per_segment whole extents. A step is a fraction of the free
budget, so that no volume takes all of it before it needs it. Descriptors are opened once and kept.
No file is deleted because reading it failed.

Invariant: all volumes share a space budget and reserve from it before they allocate. So their sum
never exceeds it, and a reserve of the file system stays free for the index and for other programs.
Only after the budget was reduced the sum may exceed it, until the volumes have given back their
shares of the excess.

Threads: any thread may call any method, except that no I/O may run during close_removed() and
close().
"""

import contextlib
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kvd.tiers.direct_io import probe_direct, set_direct
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.space_budget import SpaceBudget
from kvd.tiers.volume_identity import identify, remove_volume, sync_directory
from shared.process.log import get_logger

_STEP = 8  # a segment grows by 1 / _STEP of the free budget at a time
_WITHOUT_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL}

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """The present state of a volume, for operators.

    Attributes:
        is_direct: whether the files are read and written with O_DIRECT.
        buffered_reason: why they are not; "" when direct.
        physical_bytes: bytes that the files take up on the file system.
    """

    is_direct: bool
    buffered_reason: str
    physical_bytes: int


class SegmentFiles:
    """The segment files of one volume.

    Args:
        directory: the volume's directory.
        extent_bytes: size of a whole extent.
        extents_per_segment: extents of a full segment; fixed for the volume's life.
        budget: space that all volumes share.
        direct: "auto" and "on" use direct I/O if the file system supports it; "on" warns if it
            does not. "off" does not try.
        faults: faults that tests inject, see kvd/tiers/faults.py.

    Attributes:
        extents_per_segment, faults: see Args.
        is_direct: whether direct I/O is used.
        buffered_reason: why it is not; "" when direct.
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
        self._growing: dict[int, int] = {}  # segment → bytes whose allocation is under way
        self._removed: list[int] = []  # descriptors of removed segments, see close_removed()
        self._lock = threading.Lock()  # held while files are opened and while segments change size
        self.is_direct = False
        self.buffered_reason = "it is switched off"

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments, as the budget counts them."""
        return sum(tuple(self._sizes.values())) + sum(tuple(self._growing.values()))

    @property
    def allocated_bytes(self) -> int:
        """Bytes that the segments take up on the file system."""
        num_blocks = 0
        for segment in tuple(self._sizes):
            with contextlib.suppress(OSError):  # the file was removed by hand
                num_blocks += self._path(segment).stat().st_blocks
        return num_blocks * 512

    def physical_extents(self) -> int:
        """Return the number of extents for which space is allocated or can be allocated.

        After the budget was reduced, there may be fewer than are allocated.
        """
        num_bytes = self.reserved_bytes + self._budget.free_bytes_for(self._directory)
        return max(0, num_bytes // self._extent_bytes)

    def num_extents(self) -> int:
        """Return the number of whole extents up to the end of the last segment."""
        ends = (
            segment * self.extents_per_segment + size // self._extent_bytes
            for segment, size in tuple(self._sizes.items())
        )
        return max(ends, default=0)

    def info(self) -> VolumeInfo:
        """Return the present state of the volume, for operators."""
        return VolumeInfo(self.is_direct, self.buffered_reason, self.allocated_bytes)

    def open(
        self,
        expected_id: str = "",
        *,
        holds_rows: bool = False,
        most_bytes: int | None = None,
    ) -> str:
        """Identify the volume, probe direct I/O, and count the existing segments.

        Args, Returns, Raises: see identify(), and for `most_bytes` SpaceBudget.open().
        """
        volume_id = identify(self._directory, expected_id, self.faults, holds_rows=holds_rows)
        if self._direct != "off":
            self.is_direct = probe_direct(self._directory)
            self._use_buffered("" if self.is_direct else "its file system has no direct I/O")
        for path in self._directory.glob("*.segment"):
            if path.stem.isdigit():
                size = path.stat().st_size // self._extent_bytes * self._extent_bytes
                self._sizes[int(path.stem)] = min(size, self._full_bytes)
        self._budget.open(self._directory, self.reserved_bytes, most_bytes)
        return volume_id

    def size_of(self, segment: int) -> int:
        """Return the bytes of a segment, in whole extents; 0 if the segment does not exist.

        Raises:
            OSError: the segment exists, but cannot be opened.
        """
        size = self._sizes.get(segment, 0)
        if size:
            self.fd_for_reading(segment)
        return size

    def fd_for_reading(self, segment: int) -> int:
        """Return the descriptor of a segment.

        Raises:
            FileNotFoundError: the segment does not exist.
            OSError: the segment cannot be opened.
        """
        fd = self._fds.get(segment)
        return self._open(segment) if fd is None else fd

    def fd_for_writing(self, segment: int, end: int) -> int:
        """Return the descriptor of a segment, after allocating its first `end` bytes.

        Raises:
            OSError: ENOSPC if the budget or the file system is exhausted.
        """
        fd = self._fds.get(segment)
        if fd is not None and self._sizes.get(segment, 0) >= end:
            return fd
        with self._lock:
            if self._sizes.get(segment, 0) < end:
                self._allocate(segment, end)
        return self.fd_for_reading(segment)

    def disable_direct(self, why: str) -> bool:
        """Stop using direct I/O; return False if it was not in use."""
        with self._lock:
            if not self.is_direct:
                return False
            self.is_direct = False
            for fd in self._fds.values():
                set_direct(fd, on=False)
        self._use_buffered(why)
        return True

    def shrink(self, num_extents: int, at_most: int | None = None) -> None:
        """Release the space of every extent from `num_extents` on. None of them may be in use.

        I/O on them may still run, if nobody needs its outcome: so descriptors of removed segments
        stay open until close_removed().

        Args:
            num_extents: number of extents to keep.
            at_most: change only so many segments, the last ones; None: as many as it takes.

        Raises:
            OSError: the file system refuses.
        """
        kept_bytes = num_extents * self._extent_bytes
        cut = [s for s, size in self._sizes.items() if s * self._full_bytes + size > kept_bytes]
        for segment in sorted(cut, reverse=True)[:at_most]:
            with self._lock:
                self._cut(segment, max(0, kept_bytes - segment * self._full_bytes))
            self.faults.reach(WritePoint.SEGMENT_REMOVED)

    def close_removed(self) -> None:
        """Close the descriptors of removed segments."""
        while self._removed:
            os.close(self._removed.pop())

    def close(self) -> None:
        """Close the files."""
        self._budget.close(self._directory)
        self._sizes.clear()
        self.close_removed()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def remove(self) -> None:
        """Remove the directory, unless it still has segments."""
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

    def _cut(self, segment: int, keep: int) -> None:
        """Cut a segment to `keep` bytes; remove it if there are none."""
        size = self._sizes[segment]
        if keep:
            os.truncate(self._path(segment), keep)
            self._sizes[segment] = keep
        else:
            self._path(segment).unlink(missing_ok=True)
            del self._sizes[segment]
            fd = self._fds.pop(segment, None)
            if fd is not None:
                self._removed.append(fd)
                os.ftruncate(fd, 0)  # an open descriptor would keep the space
        self._budget.release(self._directory, size - keep)

    def _allocate(self, segment: int, end: int) -> None:
        """Allocate a segment up to `end` or beyond, so that no write finds the disk full.

        The first attempt takes a whole step; if there is no space for that, the second one takes
        only what `end` needs.
        """
        old_size = self._sizes.get(segment, 0)
        step = max(0, self._budget.free_bytes()) // _STEP // self._extent_bytes * self._extent_bytes
        for wanted in (min(self._full_bytes, end + step), end):
            granted = self._budget.reserve(
                self._directory, end - old_size, wanted - old_size, self._extent_bytes
            )
            if not granted:
                break
            # Reserved, but not in _sizes yet: without this the volume would seem to have less room.
            self._growing[segment] = granted
            try:
                self._extend(segment, old_size, old_size + granted)
            except OSError as error:
                self._budget.release(self._directory, granted)
                if error.errno != errno.ENOSPC or wanted == end:
                    raise
            else:
                self._sizes[segment] = old_size + granted
                return
            finally:
                del self._growing[segment]
        raise OSError(errno.ENOSPC, "the SSD tier has no space for another segment")

    def _extend(self, segment: int, old_size: int, size: int) -> None:
        # Not with the kept descriptor, which may be O_DIRECT: where glibc emulates fallocate, it
        # writes single bytes.
        fd = os.open(self._path(segment), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self.faults.reach(WritePoint.SEGMENT_CREATED)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in _WITHOUT_FALLOCATE:
                    raise
                os.ftruncate(fd, size)  # allocates nothing: a later write may find the disk full
            self.faults.fsync(fd)
            sync_directory(self._directory, self.faults)
            self.faults.reach(WritePoint.SEGMENT_ALLOCATED)
        except OSError:
            os.ftruncate(fd, old_size)  # a failed fallocate keeps what it has allocated
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
