"""The volume of one layout: reads and writes of blocks as extents in segment files.

A full block moves in one I/O between its extent and its slot, header first. A partial block is
packed: only its used rows are on SSD, and they go through a staging buffer. Every read verifies the
header and each layer slice (D11). With tenants' keys new extents are sealed (sealed_extents.py);
older plain extents are still read. The cache engine decides which extents are in use;
kvd/FORMATS.md describes the bytes of a header.

Failures are outcomes, not exceptions: OK; CORRUPT (the bytes are not those that were written, or
are missing); TRANSIENT (the device failed, the bytes may still be intact); FULL (no space).

Threads: any thread may read and write, one thread may call sync().
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
Offset = TypeVar("Offset", int, NDArray[np.int64])  # one offset, or an array of them

_FULL = {errno.ENOSPC, errno.EDQUOT}

log = get_logger(__name__)


class Written(NamedTuple):
    """A write that has ended; unless it failed, sync() makes it durable.

    Attributes:
        outcome: outcome of the write.
        segment: segment that was written to.
        num_failed_syncs: failed syncs of the segment before the write began.
    """

    outcome: IoOutcome
    segment: int
    num_failed_syncs: int


class SegmentVolume:
    """The extents of one layout. `files` must be opened before the first use.

    Attributes:
        files: the segment files, which the owner opens, shrinks and closes.
        shape: shape of the extents.

    Args:
        layout: layout of the blocks.
        files: segment files of whole extents of this layout.
        keys: keys of the tenants; None: extents are plain.
    """

    def __init__(self, layout: KVLayout, files: SegmentFiles, keys: Keyring | None = None) -> None:
        self._format = ExtentFormat(layout)
        self._sealed = SealedFormat(self._format, keys) if keys is not None else None
        self.files = files
        self.shape = self._format.shape
        self._segment_sectors = files.extents_per_segment * self.shape.sectors_per_extent
        self._faults = files.faults
        self._failed_syncs: dict[int, int] = {}  # segment → number of failed syncs

    def find_missing(self, extents: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Find extents whose segment is missing or too short.

        Args:
            extents: first sectors of the extents, [extents]; negative ones are not checked.

        Returns:
            Whether each extent is missing, [extents].

        Raises:
            OSError: a segment exists, but cannot be opened.
        """
        missing = np.zeros(len(extents), np.bool_)
        inside = extents >= 0
        segments, sectors = np.divmod(extents[inside], self._segment_sectors)
        ends = self._whole_extents_end(sectors * SECTOR_BYTES)
        named, index = np.unique(segments, return_inverse=True)
        sizes = np.array([self.files.size_of(segment) for segment in named.tolist()], np.int64)
        missing[inside] = ends > sizes[index]
        return missing

    # ----------------------------------------------------------------------------------- reading

    def plan_read(
        self, extent: int, key: bytes, num_tokens: int, memory: memoryview | None, *, layered: bool
    ) -> ExtentRead:
        """Plan the read of an extent; does no I/O.

        Args:
            extent: first sector of the extent.
            key: key of the block.
            num_tokens: number of tokens of the block.
            memory: memory of the slot to fill; None: the extent is only verified.
            layered: read in groups of about a mebibyte, so that the first layers are there early;
                else in as few groups as possible.
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
        """Fill buffers from an extent's byte `offset` on; return False if the file ends before."""
        segment, start = self._locate(extent)
        self._faults.before_read(extent)
        fd = self.files.fd_for_reading(segment)
        return self._transfer(lambda: read_fully(fd, buffers, start + offset))

    # ----------------------------------------------------------------------------------- writing

    def follows(self, block: WriteBlock, before: WriteBlock) -> bool:
        """Whether one write may take both blocks: both full, side by side in one segment."""
        sectors = self.shape.sectors_per_extent
        return (
            self._format.is_full(block.num_tokens)
            and self._format.is_full(before.num_tokens)
            and block.extent == before.extent + sectors
            and block.extent % self._segment_sectors != 0
        )

    def write(self, run: Sequence[ToWrite], staging: Staging) -> Written:
        """Write slots to their extents; blocks. The caller owes sync(), which makes them durable.

        Args:
            run: one block, or several of which each follows() the one before.
            staging: staging buffer of the calling thread.
        """
        first = run[0]
        segment, start = self._locate(first.extent)
        num_failed = self._failed_syncs.get(segment, 0)
        try:
            for block in run:
                self._faults.before_write(block.extent)
            end = self._whole_extents_end(start) + (len(run) - 1) * self.shape.full_bytes
            fd = self.files.fd_for_writing(segment, end)
            if self._sealed and self._sealed.keys.is_sealing:
                for offset, piece in self._sealed.pieces(run, staging):
                    self._write_part(fd, piece, start + offset)
            elif self._format.is_full(first.num_tokens):
                self._write_full(fd, run, start, staging)
            else:
                for offset, packed in self._packed_pieces(first, staging):
                    self._write_part(fd, packed, start + offset)
            self._faults.reach(WritePoint.EXTENT_WRITTEN)
        except OSError as error:
            log.warning("ssd_write_failed", extent=first.extent, error=str(error))
            return Written(_outcome(error), segment, num_failed)
        return Written(IoOutcome.OK, segment, num_failed)

    def _write_full(self, fd: int, run: Sequence[ToWrite], start: int, staging: Staging) -> None:
        """Write headers and slots of full blocks in one I/O."""
        header_bytes = self._format.header.num_bytes
        headers = staging.take(header_bytes * len(run))
        buffers = []
        for index, block in enumerate(run):
            header = headers[index * header_bytes : (index + 1) * header_bytes]
            self._format.header.pack_into(header, block.key, block.num_tokens, block.stored)
            buffers += [header, block.memory]
        self._transfer(lambda: write_fully(fd, buffers, start))

    def copy(self, source: int, extent: int, num_tokens: int, staging: Staging) -> Written:
        """Copy an extent as it is, sealed or plain; blocks. The caller owes sync().

        Whoever reads the copy verifies it. The outcome is CORRUPT if the source is not there.
        """
        segment, start = self._locate(extent)
        num_failed = self._failed_syncs.get(segment, 0)
        num_bytes = self.shape.num_sectors(num_tokens) * SECTOR_BYTES
        try:
            self._faults.before_write(extent)
            fd = self.files.fd_for_writing(segment, self._whole_extents_end(start))
            for offset in range(0, num_bytes, STAGED_IO_BYTES):
                piece = staging.take(min(STAGED_IO_BYTES, num_bytes - offset))
                if not self._is_read(source, offset, piece):
                    return Written(IoOutcome.CORRUPT, segment, num_failed)
                self._write_part(fd, piece, start + offset)
            self._faults.reach(WritePoint.EXTENT_WRITTEN)
        except OSError as error:
            log.warning("extent_not_copied", source=source, extent=extent, error=str(error))
            return Written(_outcome(error), segment, num_failed)
        return Written(IoOutcome.OK, segment, num_failed)

    def _is_read(self, extent: int, offset: int, buffer: memoryview) -> bool:
        """Fill a buffer like `_read_at`; return False also if the segment is gone."""
        try:
            return self._read_at(extent, offset, [buffer])
        except FileNotFoundError:
            return False

    def sync(self, batch: Sequence[Written]) -> list[IoOutcome]:
        """Make writes durable, with one sync per segment; return their outcomes."""
        failed: dict[int, IoOutcome] = {}
        for segment in {written.segment for written in batch if written.outcome is IoOutcome.OK}:
            try:
                self._faults.fdatasync(self.files.fd_for_reading(segment))
                self._faults.reach(WritePoint.SEGMENT_SYNCED)
            except OSError as error:
                # The kernel forgets pages that it could not write: the next sync succeeds without
                # them. So all writes since the last sync count as lost, also those that have ended
                # by now, but are not in this batch.
                self._failed_syncs[segment] = self._failed_syncs.get(segment, 0) + 1
                failed[segment] = _outcome(error)
                log.warning("ssd_sync_failed", segment=segment, error=str(error))
        return [self._sync_outcome(written, failed) for written in batch]

    def _sync_outcome(self, written: Written, failed: dict[int, IoOutcome]) -> IoOutcome:
        if written.outcome is not IoOutcome.OK:
            return written.outcome
        if written.segment in failed:
            return failed[written.segment]
        is_lost = written.num_failed_syncs != self._failed_syncs.get(written.segment, 0)
        return IoOutcome.TRANSIENT if is_lost else IoOutcome.OK

    def _packed_pieces(self, block: ToWrite, staging: Staging) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in the extent, bytes) of each piece of a partial block."""
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
        """Copy used rows side by side, and zero the padding.

        Unused rows of the slot are not copied: they may hold data of another session.
        """
        offset = 0
        for layer in group.layers:
            end = offset + self._format.slice_bytes(layer, num_tokens)
            for first, last in self._format.rows.runs(layer, num_tokens):
                packed[offset : offset + last - first] = memory[first:last]
                offset += last - first
            packed[offset:end] = bytes(end - offset)
            offset = end

    def _write_part(self, fd: int, packed: memoryview, offset: int) -> None:
        self._transfer(lambda: write_fully(fd, [packed], offset))

    # --------------------------------------------------------------------------------- internals

    def _transfer(self, transfer: Callable[[], T]) -> T:
        """Run an I/O; repeat it through the page cache if the file system refuses direct I/O."""
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
        """Return the end of the whole extent that contains byte `start` of a segment."""
        return (start // self.shape.full_bytes + 1) * self.shape.full_bytes


def _outcome(error: OSError) -> IoOutcome:
    return IoOutcome.FULL if error.errno in _FULL else IoOutcome.TRANSIENT
