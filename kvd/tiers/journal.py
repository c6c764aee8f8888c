"""The journal of one arena: what each slot holds, for the kvd that comes after us (D4, D10).

Its memory is mapped by kvd alone: an engine can neither read nor forge it. The byte tables are in
kvd/FORMATS.md. Invariants:
1. whatever instruction a kill falls on, each record is the old one, the new one, or FREE: the state
   goes to FREE first, then body and checksum are written, then the state in one store;
2. reading never fails: a record whose checksum or fields are off is FREE, a header that is off is
   an UnfitArenaError with its reason.
"""

import mmap
import os
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from kvd.core.records.entries import AdoptedSlot, CommittedSlot, SlotRecord, WritingSlot
from kvd.host.process_identity import INSTANCE_BYTES, NOBODY, ProcessIdentity
from kvd.tiers.faults import Faults, WritePoint
from shared.types.block_key import KEY_BYTES, TOKEN_BYTES
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES, align_up

MAGIC = b"KVDARENA"
VERSION = 1
HEADER_BYTES = SECTOR_BYTES
CHECKSUM_BYTES = 8  # per layer
MAX_EPOCH = (1 << 23) - 1  # lease ids are epoch << 40 | number

FREE, WRITING, COMMITTED = 0, 1, 2

# magic, version, header bytes, arena id, layout, slot bytes, number of slots, record bytes, boot
# id, inode of the slots' file
_HEADER = struct.Struct("<8sII16s16sQII16sQ")
_CHECKSUM = struct.Struct("<Q")
_EPOCH_OFFSET = 128  # in the header, outside its checksum: it changes
_BODY_OFFSET = 16  # in a record: after state and checksum
# generation, lease id, process start, pid, number of tokens, instance, block key
_BODY = struct.Struct(f"<QQQII{INSTANCE_BYTES}s{KEY_BYTES}s")


class UnfitArenaError(Exception):
    """An arena that cannot be taken over; the message says why."""


@dataclass(frozen=True)
class ArenaHeader:
    """What the journal's first page says of its arena."""

    arena_id: bytes
    layout: bytes
    slot_bytes: int
    num_slots: int
    record_bytes: int
    boot_id: bytes
    slots_inode: int


@dataclass(frozen=True)
class JournaledWrite:
    """A slot that an engine was writing to when the last kvd ended."""

    slot_id: int
    generation: int
    lease_id: int
    writer: ProcessIdentity


def record_bytes_of(layout: KVLayout) -> int:
    """Return the size of a record, which has room for a full block's token ids and checksums."""
    body = _BODY.size + CHECKSUM_BYTES * len(layout.layers) + TOKEN_BYTES * layout.block_tokens
    return align_up(_BODY_OFFSET + body, 64)  # a cache line


def journal_bytes(layout: KVLayout, num_slots: int) -> int:
    """Return the size of the journal's file."""
    return align_up(HEADER_BYTES + record_bytes_of(layout) * num_slots, SECTOR_BYTES)


def header_of(layout: KVLayout, num_slots: int, boot_id: str, slots_inode: int) -> ArenaHeader:
    """Make the header of a new arena, with a new id."""
    return ArenaHeader(
        arena_id=uuid.uuid4().bytes,
        layout=bytes.fromhex(layout.fingerprint),
        slot_bytes=layout.block_bytes,
        num_slots=num_slots,
        record_bytes=record_bytes_of(layout),
        boot_id=uuid.UUID(boot_id).bytes,
        slots_inode=slots_inode,
    )


def pack_header(header: ArenaHeader) -> bytes:
    """Encode a header with its checksum."""
    fields = (header.arena_id, header.layout, header.slot_bytes, header.num_slots)
    body = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_BYTES,
        *fields,
        header.record_bytes,
        header.boot_id,
        header.slots_inode,
    )
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack_header(data: bytes) -> ArenaHeader:
    """Decode a header.

    Raises:
        UnfitArenaError: the header is none, damaged, or of another version.
    """
    body = data[: _HEADER.size]
    if len(data) < _HEADER.size + _CHECKSUM.size or not body.startswith(MAGIC):
        raise UnfitArenaError("it has no journal header")
    magic, version, header_bytes, *fields = _HEADER.unpack(body)
    del magic
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise UnfitArenaError(f"its format is version {version}, this kvd has {VERSION}")
    if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise UnfitArenaError("its journal header is damaged")
    return ArenaHeader(*fields)


class Journal:
    """One arena's journal, mapped.

    Args:
        fd: descriptor of the journal's file; the caller may close it afterwards.
        layout: the layout of the arena's blocks.
        num_slots: how many slots the arena has.
        faults: faults that tests inject, see kvd/tiers/faults.py.

    Raises:
        UnfitArenaError: the file is too small for its records.
        OSError: the file cannot be mapped.
    """

    def __init__(self, fd: int, layout: KVLayout, num_slots: int, faults: Faults) -> None:
        self._layout = layout
        self._num_slots = num_slots
        self._record_bytes = record_bytes_of(layout)
        self._faults = faults
        size = journal_bytes(layout, num_slots)
        if os.fstat(fd).st_size < size:
            raise UnfitArenaError(f"its journal has {os.fstat(fd).st_size} bytes, not {size}")
        # Whole huge pages where the file has them, but never more than the file: a file system may
        # name a huge page as its block size and still have files of any size.
        mapped = min(align_up(size, os.fstat(fd).st_blksize), os.fstat(fd).st_size)
        self._memory = mmap.mmap(fd, mapped)
        self._words = memoryview(self._memory).cast("Q")  # a store to it is one instruction

    @property
    def header(self) -> ArenaHeader:
        """The header.

        Raises:
            UnfitArenaError: the header is unfit, see unpack_header.
        """
        return unpack_header(self._memory[:HEADER_BYTES])

    @property
    def epoch(self) -> int:
        """How many kvds have used the arena, from a random start; always fit for a lease id."""
        return int(self._words[_EPOCH_OFFSET // 8]) & MAX_EPOCH

    def write_header(self, header: ArenaHeader, epoch: int) -> None:
        """Make a zeroed file a journal."""
        self._words[_EPOCH_OFFSET // 8] = epoch
        packed = pack_header(header)
        self._memory[: len(packed)] = packed

    def raise_epoch(self) -> int:
        """Begin the time of another kvd; return its epoch."""
        epoch = self.epoch % MAX_EPOCH + 1
        self._words[_EPOCH_OFFSET // 8] = epoch
        self._faults.reach(WritePoint.ARENA_ADOPTED)
        return epoch

    def put(self, slot_id: int, record: SlotRecord, writer: ProcessIdentity | None = None) -> None:
        """Note what a slot holds. A few microseconds.

        Args:
            slot_id: a slot of the arena.
            record: the slot's contents, or its writer.
            writer: process that writes to the slot; needed for a WritingSlot only.
        """
        state, body = _packed(record, writer or NOBODY)
        offset = self._offset(slot_id)
        self._words[offset // 8] = FREE
        self._faults.reach(WritePoint.JOURNAL_FREED)
        start = offset + _BODY_OFFSET
        self._memory[start : start + len(body)] = body
        self._words[offset // 8 + 1] = xxhash.xxh3_64_intdigest(body, seed=state)
        self._faults.reach(WritePoint.JOURNAL_BODY)
        self._words[offset // 8] = state
        self._faults.reach(WritePoint.JOURNAL_PUT)

    def clear(self, slot_id: int) -> None:
        """Note that a slot holds nothing."""
        self._words[self._offset(slot_id) // 8] = FREE
        self._faults.reach(WritePoint.JOURNAL_CLEARED)

    def wipe(self, slot_id: int) -> None:
        """Zero the record of a slot that holds nothing: token ids of its last block are in it."""
        self._faults.reach(WritePoint.SLOT_WIPED)
        offset = self._offset(slot_id)
        self._memory[offset : offset + self._record_bytes] = bytes(self._record_bytes)

    def read_all(self) -> tuple[list[AdoptedSlot], list[JournaledWrite]]:
        """Return what is committed, and what is being written; everything else is free."""
        adopted: list[AdoptedSlot] = []
        writing: list[JournaledWrite] = []
        for slot_id, state, body in self._records():
            generation, lease_id, start_ticks, pid, num_tokens, instance, key = _BODY.unpack_from(
                body
            )
            if state == WRITING:
                identity = ProcessIdentity(pid, start_ticks, instance if any(instance) else b"")
                writing.append(JournaledWrite(slot_id, generation, lease_id, identity))
                continue
            checksums_end = _BODY.size + CHECKSUM_BYTES * len(self._layout.layers)
            block = CommittedSlot(
                generation, key, num_tokens, body[checksums_end:], body[_BODY.size : checksums_end]
            )
            adopted.append(AdoptedSlot(slot_id, block))
        return adopted, writing

    def close(self) -> None:
        """Unmap the journal; what it says stays."""
        self._words.release()
        self._memory.close()

    def _records(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (slot, state, body) of the records that are sound and not free."""
        for slot_id in range(self._num_slots):
            offset = self._offset(slot_id)
            state = int(self._words[offset // 8])
            start = offset + _BODY_OFFSET
            size = self._body_bytes(state, start)
            if not size:
                continue
            body = self._memory[start : start + size]
            if int(self._words[offset // 8 + 1]) == xxhash.xxh3_64_intdigest(body, seed=state):
                yield slot_id, state, body

    def _body_bytes(self, state: int, start: int) -> int:
        """Return the bytes of the body of a record in this state; 0 if it holds nothing sound."""
        if state == WRITING:
            return _BODY.size
        if state != COMMITTED:
            return 0
        num_tokens: int = _BODY.unpack_from(self._memory, start)[4]
        fewest = self._layout.fewest_block_tokens
        if not fewest <= num_tokens <= self._layout.block_tokens:
            return 0
        return _BODY.size + CHECKSUM_BYTES * len(self._layout.layers) + TOKEN_BYTES * num_tokens

    def _offset(self, slot_id: int) -> int:
        assert 0 <= slot_id < self._num_slots, "the arena has this slot"  # noqa: S101
        return HEADER_BYTES + slot_id * self._record_bytes


def _packed(record: SlotRecord, writer: ProcessIdentity) -> tuple[int, bytes]:
    """Return the state and the body of a record."""
    if isinstance(record, WritingSlot):
        fields = (writer.start_ticks, writer.pid, 0, writer.instance, bytes(KEY_BYTES))
        return WRITING, _BODY.pack(record.generation, record.lease_id, *fields)
    fields = (0, 0, record.num_tokens, b"", record.key)
    fixed = _BODY.pack(record.generation, 0, *fields)
    return COMMITTED, fixed + record.checksums + record.token_ids
