"""The SSD tier's bytes of one layout: extents with headers, in segment files.

A full block moves in one I/O between its extent and its slot, header first. A partial block is
packed: only its used rows are on SSD, and they go through a staging buffer. Every read verifies the
header and each layer slice (D11). With tenants' keys extents are sealed (sealed_extents.py); those
that were written before are read as they are. Which extents are in use is the cache engine's
business; the bytes of a header are in kvd/FORMATS.md.

Outcomes, never exceptions: OK; CORRUPT (the bytes are not what was written, or are not there);
TRANSIENT (the device failed, the bytes may still be good); FULL (no space).

Threads: reads and writes from any number, sync() from one.
"""

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.actions import IoOutcome, WriteBlock
from kvd.encryption.keyring import Keyring
from kvd.tiers.direct_io import STAGED_IO_BYTES, Staging, read_fully, write_fully
from kvd.tiers.extent_format import LAYERED_IO_BYTES, ExtentFormat, GroupPlan, ToWrite
from kvd.tiers.extent_read import ExtentRead
from kvd.tiers.faults import WritePoint
from kvd.tiers.sealed_extents import SealedFormat
from kvd.tiers.segment_files import SegmentFiles
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES

T = TypeVar("T")
Offset = TypeVar("Offset", int, NDArray[np.int64])  # one, or many

_FULL = {errno.ENOSPC, errno.EDQUOT}

log = get_logger(__name__)


class Written(NamedTuple):
    """A write that has ended; unless it failed, sync() says whether it is durable."""

    outcome: IoOutcome
    segment: int
    num_failed_syncs: int  # of the segment, before the write began


class SegmentVolume:
    """The extents of one layout. Its `files` are opened before its first use.

    Attributes:
        files: the segments, which are opened, shrunk and closed there.
        shape: shape of the extents.

    Args:
        layout: layout of the blocks.
        files: segment files of whole extents of this layout.
        keys: the tenants'; None: extents are plain.
    """

    def __init__(self, layout: KVLayout, files: SegmentFiles, keys: Keyring | None = None) -> None:
        self._format = ExtentFormat(layout)
        self._sealed = SealedFormat(self._format, keys) if keys is not None else None
        self.files = files
        self.shape = self._format.shape
        self._segment_sectors = files.extents_per_segment * self.shape.sectors_per_extent
        self._faults = files.faults
        self._failed_syncs: dict[int, int] = {}  # segment → how many

    def lacks(self, extents: NDArray[np.int64], num_extents: int) -> NDArray[np.bool_]:
        """Find the extents that are missing: of segments that are not there, or are cut short.

        Args:
            extents: first sectors.
            num_extents: the volume may have; what lies beyond is not looked at.

        Raises:
            OSError: a segment that has some of them cannot be opened.
        """
        lacking = np.zeros(len(extents), np.bool_)
        inside = (extents >= 0) & (extents < num_extents * self.shape.sectors_per_extent)
        segments, sectors = np.divmod(extents[inside], self._segment_sectors)
        ends = self._whole_extents_end(sectors * SECTOR_BYTES)
        named, index = np.unique(segments, return_inverse=True)
        sizes = np.array([self.files.size_of(segment) for segment in named.tolist()], np.int64)
        lacking[inside] = ends > sizes[index]
        return lacking

    # ----------------------------------------------------------------------------------- reading

    def reading(
        self, extent: int, key: bytes, num_tokens: int, memory: memoryview | None, *, layered: bool
    ) -> ExtentRead:
        """Plan a read into a slot, or into nothing if only to verify it; does no I/O.

        Layered reads have a group for about each mebibyte; others as few as may be.
        """
        is_slots = memory is not None and self._format.is_full(num_tokens) and not self._sealed
        least_bytes = math.inf if is_slots else float(STAGED_IO_BYTES)
        groups = self._format.plan(num_tokens, LAYERED_IO_BYTES if layered else least_bytes)

        def read(offset: int, buffers: list[memoryview]) -> bool:
            return self._read_at(extent, offset, buffers)

        return ExtentRead(
            extent_format=self._format,
            key=key,
            num_tokens=num_tokens,
            memory=memory,
            groups=groups,
            source=read,
            sealed=self._sealed,
        )

    def _read_at(self, extent: int, offset: int, buffers: list[memoryview]) -> bool:
        """Fill buffers from an extent's byte `offset` on; False if its file ends before."""
        segment, start = self._locate(extent)
        self._faults.before_read(extent)
        fd = self.files.for_reading(segment)
        return self._retried(lambda: read_fully(fd, buffers, start + offset))

    # ----------------------------------------------------------------------------------- writing

    def follows(self, block: WriteBlock, before: WriteBlock) -> bool:
        """Whether two blocks may go to SSD in one write: full ones, side by side in one segment."""
        sectors = self.shape.sectors_per_extent
        return (
            self._format.is_full(block.num_tokens)
            and self._format.is_full(before.num_tokens)
            and block.extent == before.extent + sectors
            and block.extent % self._segment_sectors != 0
        )

    def write(self, run: Sequence[ToWrite], staging: Staging) -> Written:
        """Write slots to their extents; blocks. They are not durable before sync().

        Args:
            run: one block, or several of which each follows the one before.
            staging: staging buffer of the calling thread.
        """
        first = run[0]
        segment, start = self._locate(first.extent)
        num_failed = self._failed_syncs.get(segment, 0)
        try:
            for block in run:
                self._faults.before_write(block.extent)
            end = self._whole_extents_end(start) + (len(run) - 1) * self.shape.full_bytes
            fd = self.files.for_writing(segment, end)
            if self._sealed and self._sealed.keys.is_sealing:
                for offset, piece in self._sealed.pieces(run, staging):
                    self._write_part(fd, piece, start + offset)
            elif self._format.is_full(first.num_tokens):
                self._write_full(fd, run, start, staging)
            else:
                for offset, packed in self._packed(first, staging):
                    self._write_part(fd, packed, start + offset)
            self._faults.reach(WritePoint.EXTENT_WRITTEN)
        except OSError as error:
            log.warning("ssd_write_failed", extent=first.extent, error=str(error))
            return Written(_outcome(error), segment, num_failed)
        return Written(IoOutcome.OK, segment, num_failed)

    def _write_full(self, fd: int, run: Sequence[ToWrite], start: int, staging: Staging) -> None:
        """Write header and slot of each block, all in one I/O."""
        header_bytes = self._format.header.num_bytes
        headers = staging.take(header_bytes * len(run))
        buffers = []
        for index, block in enumerate(run):
            header = headers[index * header_bytes : (index + 1) * header_bytes]
            self._format.header.pack_into(header, block.key, block.num_tokens, block.stored)
            buffers += [header, block.memory]
        self._retried(lambda: write_fully(fd, buffers, start))

    def sync(self, batch: Sequence[Written]) -> list[IoOutcome]:
        """Make writes durable, with one sync per segment."""
        failed: dict[int, IoOutcome] = {}
        for segment in {written.segment for written in batch if written.outcome is IoOutcome.OK}:
            try:
                self._faults.fdatasync(self.files.for_reading(segment))
                self._faults.reach(WritePoint.SEGMENT_SYNCED)
            except OSError as error:
                # What the kernel could not write it forgets: all since the last sync is lost, what
                # was written by now but is not in this batch too.
                self._failed_syncs[segment] = self._failed_syncs.get(segment, 0) + 1
                failed[segment] = _outcome(error)
                log.warning("ssd_sync_failed", segment=segment, error=str(error))
        return [self._synced(written, failed) for written in batch]

    def _synced(self, written: Written, failed: dict[int, IoOutcome]) -> IoOutcome:
        if written.outcome is not IoOutcome.OK:
            return written.outcome
        if written.segment in failed:
            return failed[written.segment]
        is_lost = written.num_failed_syncs != self._failed_syncs.get(written.segment, 0)
        return IoOutcome.TRANSIENT if is_lost else IoOutcome.OK

    def _packed(self, block: ToWrite, staging: Staging) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in the extent, bytes) of a partial block, piece by piece."""
        for index, group in enumerate(self._format.plan(block.num_tokens, STAGED_IO_BYTES)):
            header_bytes = 0 if index else self._format.header.num_bytes
            buffer = staging.take(header_bytes + group.num_bytes)
            if header_bytes:
                self._format.header.pack_into(buffer, block.key, block.num_tokens, block.stored)
            self._gather(group, block.num_tokens, block.memory, buffer[header_bytes:])
            yield group.offset - header_bytes, buffer

    def _gather(
        self, group: GroupPlan, num_tokens: int, memory: memoryview, packed: memoryview
    ) -> None:
        """Copy used rows together; what lies behind them in the slot is nobody else's to see."""
        offset = 0
        for layer in group.layers:
            end = offset + self._format.slice_bytes(layer, num_tokens)
            for first, last in self._format.rows.runs(layer, num_tokens):
                packed[offset : offset + last - first] = memory[first:last]
                offset += last - first
            packed[offset:end] = bytes(end - offset)
            offset = end

    def _write_part(self, fd: int, packed: memoryview, offset: int) -> None:
        self._retried(lambda: write_fully(fd, [packed], offset))

    # ------------------------------------------------------------------------------------ inside

    def _retried(self, transfer: Callable[[], T]) -> T:
        """Transfer, once more through the page cache if the file system refuses direct I/O."""
        try:
            return transfer()
        except OSError as error:
            if error.errno != errno.EINVAL or not self.files.disable_direct(str(error)):
                raise
        return transfer()

    def _locate(self, extent: int) -> tuple[int, int]:
        """Return (segment, byte offset in it) of an extent."""
        segment, sector = divmod(extent, self._segment_sectors)
        return segment, sector * SECTOR_BYTES

    def _whole_extents_end(self, start: Offset) -> Offset:
        """Return the end of the whole extent that has byte `start` of a segment."""
        return (start // self.shape.full_bytes + 1) * self.shape.full_bytes


def _outcome(error: OSError) -> IoOutcome:
    return IoOutcome.FULL if error.errno in _FULL else IoOutcome.TRANSIENT
