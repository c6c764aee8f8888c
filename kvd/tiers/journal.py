"""The journal of one arena: a record of each slot's contents, for the next kvd (D4, D10).

Only kvd maps the journal: an engine can neither read nor forge it. The byte tables are in
kvd/FORMATS.md. Invariants:
1. If kvd is killed at any instruction, each record is the old one, the new one, or FREE. The state
   becomes FREE first, then body and checksum are written, then the new state with one store.
2. Reading records never fails: a record with a wrong checksum or wrong fields is FREE. A wrong
   header is an UnfitArenaError that says why.
"""

import mmap
import os
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import xxhash

from kvd.core.records.entries import AdoptedSlot, CommittedSlot, SlotRecord, WritingSlot
from kvd.host.process_identity import INSTANCE_BYTES, NO_PROCESS, ProcessIdentity
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
    """The header of a journal, which identifies its arena.

    Attributes:
        arena_id: random id of the arena, 16 bytes.
        layout: fingerprint of the layout, 16 bytes.
        slot_bytes: size of a slot.
        num_slots: number of slots.
        record_bytes: size of a record of the journal.
        boot_id: id of the boot in which the arena was created, 16 bytes.
        slots_inode: inode of the slots' file, which pairs it with the journal.
    """

    arena_id: bytes
    layout: bytes
    slot_bytes: int
    num_slots: int
    record_bytes: int
    boot_id: bytes
    slots_inode: int


@dataclass(frozen=True)
class JournaledWrite:
    """A slot that an engine was writing to when the last kvd ended.

    Attributes:
        slot_id: the slot.
        generation: generation of the slot.
        lease_id: lease of the store.
        writer: the engine's process.
    """

    slot_id: int
    generation: int
    lease_id: int
    writer: ProcessIdentity


def record_bytes_of(layout: KVLayout) -> int:
    """Return the bytes of a record, which has room for a full block's token ids and checksums."""
    body = _BODY.size + CHECKSUM_BYTES * len(layout.layers) + TOKEN_BYTES * layout.block_tokens
    return align_up(_BODY_OFFSET + body, 64)  # a cache line


def journal_bytes(layout: KVLayout, num_slots: int) -> int:
    """Return the bytes of the journal's file."""
    return align_up(HEADER_BYTES + record_bytes_of(layout) * num_slots, SECTOR_BYTES)


def header_of(layout: KVLayout, num_slots: int, boot_id: str, slots_inode: int) -> ArenaHeader:
    """Return the header of a new arena, with a new id."""
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
        UnfitArenaError: the data is not a header, or is damaged, or of another version.
    """
    body = data[: _HEADER.size]
    if len(data) < _HEADER.size + _CHECKSUM.size or not body.startswith(MAGIC):
        raise UnfitArenaError("it has no journal header")
    magic, version, header_bytes, *fields = _HEADER.unpack(body)
    del magic
    if version != VERSION or header_bytes != HEADER_BYTES:
        raise UnfitArenaError(f"its format has version {version}, but this kvd knows {VERSION}")
    if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise UnfitArenaError("its journal header is damaged")
    return ArenaHeader(*fields)


class Journal:
    """The mapped journal of one arena.

    Args:
        fd: descriptor of the journal's file; the caller may close it afterwards.
        layout: layout of the arena's blocks.
        num_slots: number of the arena's slots.
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
            raise UnfitArenaError(f"its journal has {os.fstat(fd).st_size} bytes instead of {size}")
        # hugetlbfs maps whole huge pages only. But never map beyond the file: a file system may
        # report a huge page as its block size and still have files of any size.
        mapped = min(align_up(size, os.fstat(fd).st_blksize), os.fstat(fd).st_size)
        self._memory = mmap.mmap(fd, mapped)
        self._words = memoryview(self._memory).cast("Q")  # a store to it is one instruction

    @property
    def header(self) -> ArenaHeader:
        """The decoded header.

        Raises:
            UnfitArenaError: see unpack_header().
        """
        return unpack_header(self._memory[:HEADER_BYTES])

    @property
    def epoch(self) -> int:
        """Number of kvd processes that have used the arena, from a random start; ≤ MAX_EPOCH."""
        return int(self._words[_EPOCH_OFFSET // 8]) & MAX_EPOCH

    def write_header(self, header: ArenaHeader, epoch: int) -> None:
        """Write header and first epoch into a zeroed file."""
        self._words[_EPOCH_OFFSET // 8] = epoch
        packed = pack_header(header)
        self._memory[: len(packed)] = packed

    def raise_epoch(self) -> int:
        """Begin the epoch of this kvd, and return it."""
        epoch = self.epoch % MAX_EPOCH + 1
        self._words[_EPOCH_OFFSET // 8] = epoch
        self._faults.reach(WritePoint.ARENA_ADOPTED)
        return epoch

    def write(
        self,
        records: Mapping[int, SlotRecord | None],
        identity_of: Callable[[int], ProcessIdentity],
    ) -> None:
        """Record the contents of slots, one after the other; takes a few microseconds each.

        Args:
            records: by slot of the arena; None: the slot is free.
            identity_of: returns the process of an engine that writes to slots.
        """
        writers: dict[int, ProcessIdentity] = {}  # by engine: an identity costs as much as a record
        for slot_id, record in records.items():
            if record is None:
                self.clear(slot_id)
                continue
            writer = NO_PROCESS
            if isinstance(record, WritingSlot):
                engine_id = record.engine_id
                if engine_id not in writers:
                    writers[engine_id] = identity_of(engine_id)
                writer = writers[engine_id]
            self.put(slot_id, record, writer)

    def put(self, slot_id: int, record: SlotRecord, writer: ProcessIdentity = NO_PROCESS) -> None:
        """Record the contents of a slot.

        Args:
            slot_id: a slot of the arena.
            record: the slot's committed block, or the lease that writes to it.
            writer: process that writes to the slot; needed for a WritingSlot only.
        """
        state, body = _pack_record(record, writer)
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
        """Record that a slot is free."""
        self._words[self._offset(slot_id) // 8] = FREE
        self._faults.reach(WritePoint.JOURNAL_CLEARED)

    def wipe(self, slot_id: int) -> None:
        """Zero the record of a free slot, which still has token ids of its last block."""
        self._faults.reach(WritePoint.SLOT_WIPED)
        offset = self._offset(slot_id)
        self._memory[offset : offset + self._record_bytes] = bytes(self._record_bytes)

    def read_all(self) -> tuple[list[AdoptedSlot], list[JournaledWrite]]:
        """Return the committed slots and those that are being written; all others are free."""
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
        """Unmap the journal; its contents stay."""
        self._words.release()
        self._memory.close()

    def _records(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (slot, state, body) of the valid records that are not free."""
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
        """Return the bytes of a record's body; 0 if the record is free or not valid.

        Args:
            state: state of the record.
            start: byte offset of the body in the journal.
        """
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


def _pack_record(record: SlotRecord, writer: ProcessIdentity) -> tuple[int, bytes]:
    """Encode a record: return its state and its body."""
    if isinstance(record, WritingSlot):
        fields = (writer.start_ticks, writer.pid, 0, writer.instance, bytes(KEY_BYTES))
        return WRITING, _BODY.pack(record.generation, record.lease_id, *fields)
    fields = (0, 0, record.num_tokens, b"", record.key)
    fixed = _BODY.pack(record.generation, 0, *fields)
    return COMMITTED, fixed + record.checksums + record.token_ids
