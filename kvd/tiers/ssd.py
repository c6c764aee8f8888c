"""The SSD tier's bytes: one volume per layout, made of preallocated segment files of fixed extents.

    <state>/volumes/<layout fingerprint>/00000.segment     extents_per_segment extents each
                                         00001.segment     allocated when first written to

An extent holds one block, byte for byte as it lies in its slot. Every layer slice is checksummed
with xxh3_64 when it is written and verified when it is read (D11). Which extent holds what is the
manifest's business: this module only moves bytes.

Outcomes, never exceptions: OK; CORRUPT (the bytes are not what was written, or are not there);
TRANSIENT (the device failed, the bytes may still be good); FULL (no space). Nothing here deletes a
file because reading it failed.

Threads: read() from any number; write() from one at a time.
"""

import errno
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from kvd.core.actions import IoOutcome
from shared.kv_layout import KVLayout
from shared.log import get_logger

_FULL = {errno.ENOSPC, errno.EDQUOT}

log = get_logger(__name__)


class Faults(Protocol):
    """Where tests inject failures: each method may raise OSError in place of the device."""

    def before_read(self, extent: int) -> None:
        """Run before an extent is read."""
        ...

    def before_write(self, extent: int) -> None:
        """Run before an extent is written."""
        ...


class NoFaults:
    """The device's own failures only."""

    def before_read(self, extent: int) -> None:
        """Let it happen."""

    def before_write(self, extent: int) -> None:
        """Let it happen."""


@dataclass(frozen=True)
class Written:
    """Result of one block's write; the checksums mean nothing unless OK."""

    outcome: IoOutcome
    checksums: tuple[int, ...] = ()


class SegmentVolume:
    """The segments of one layout."""

    def __init__(
        self,
        directory: Path,
        layout: KVLayout,
        num_extents: int,
        extents_per_segment: int,
        faults: Faults,
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._num_extents = num_extents
        self._extents_per_segment = extents_per_segment
        self._faults = faults
        self._fds: dict[int, int] = {}  # segment → descriptor
        self._lock = threading.Lock()  # guards _fds

    def open(self) -> None:
        """Make the directory and give back segments that lie wholly beyond num_extents.

        Raises:
            OSError: the directory cannot be made.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._directory.glob("*.segment"):
            if (
                path.stem.isdigit()
                and int(path.stem) * self._extents_per_segment >= self._num_extents
            ):
                path.unlink()  # ssd.bytes was made smaller

    def read(self, extent: int, memory: memoryview, checksums: tuple[int, ...]) -> IoOutcome:
        """Fill `memory` (one slot) from an extent and verify every layer slice."""
        segment, offset = self._place(extent)
        try:
            self._faults.before_read(extent)
            fd = self._segment(segment, create=False)
            if not _read_fully(fd, memory, offset):
                return IoOutcome.CORRUPT
        except FileNotFoundError:
            return IoOutcome.CORRUPT
        except OSError as error:
            log.warning("ssd_read_failed", extent=extent, error=str(error))
            return IoOutcome.TRANSIENT
        return IoOutcome.OK if self._hash(memory) == checksums else IoOutcome.CORRUPT

    def write(self, batch: Sequence[tuple[int, memoryview]]) -> list[Written]:
        """Write (extent, slot memory) pairs and make them durable with one sync per segment."""
        written: list[Written] = []
        synced: dict[int, IoOutcome] = {}
        for extent, memory in batch:
            written.append(self._write_one(extent, memory))
            if written[-1].outcome is IoOutcome.OK:
                synced[self._place(extent)[0]] = IoOutcome.OK
        for segment in synced:
            try:
                os.fdatasync(self._segment(segment, create=False))
            except OSError as error:
                # What the kernel could not write it forgets: all since the last sync is lost.
                synced[segment] = _outcome(error)
                log.warning("ssd_sync_failed", segment=segment, error=str(error))
        for position, (extent, _) in enumerate(batch):
            failed = synced.get(self._place(extent)[0], IoOutcome.OK)
            if failed is not IoOutcome.OK and written[position].outcome is IoOutcome.OK:
                written[position] = Written(failed)
        return written

    def close(self) -> None:
        """Close the files. No read or write may be running."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def _write_one(self, extent: int, memory: memoryview) -> Written:
        segment, offset = self._place(extent)
        try:
            self._faults.before_write(extent)
            fd = self._segment(segment, create=True)
            done = 0
            while done < len(memory):
                done += os.pwritev(fd, [memory[done:]], offset + done)
        except OSError as error:
            log.warning("ssd_write_failed", extent=extent, error=str(error))
            return Written(_outcome(error))
        return Written(IoOutcome.OK, self._hash(memory))

    def _hash(self, memory: memoryview) -> tuple[int, ...]:
        """One checksum per layer slice, padding included."""
        offsets = (*self._layout.slice_offsets, self._layout.block_bytes)
        return tuple(
            xxhash.xxh3_64_intdigest(memory[start:end])
            for start, end in itertools.pairwise(offsets)
        )

    def _place(self, extent: int) -> tuple[int, int]:
        """(segment, byte offset in it)."""
        segment, index = divmod(extent, self._extents_per_segment)
        return segment, index * self._layout.block_bytes

    def _segment(self, segment: int, *, create: bool) -> int:
        """Descriptor of a segment, opened once; with `create`, allocated if it does not exist."""
        with self._lock:
            if segment in self._fds:
                return self._fds[segment]
            path = self._directory / f"{segment:05}.segment"
            flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
            fd = os.open(path, flags, 0o600)
            try:
                if create:
                    self._allocate(fd, segment)
            except OSError:
                os.close(fd)
                raise
            self._fds[segment] = fd
            return fd

    def _allocate(self, fd: int, segment: int) -> None:
        """Reserve the segment's space now, so that a later write does not find the disk full."""
        first = segment * self._extents_per_segment
        num_extents = min(self._extents_per_segment, self._num_extents - first)
        size = num_extents * self._layout.block_bytes
        had = os.fstat(fd).st_size
        if had >= size:
            return
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            os.ftruncate(fd, had)  # a failed fallocate keeps what it took
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems without it
                raise


def _read_fully(fd: int, memory: memoryview, offset: int) -> bool:
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:  # the file ends here
            return False
        done += count
    return True


def _outcome(error: OSError) -> IoOutcome:
    return IoOutcome.FULL if error.errno in _FULL else IoOutcome.TRANSIENT
