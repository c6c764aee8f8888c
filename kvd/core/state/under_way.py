"""Operations that the performer has yet to complete, and writes that wait to be issued.

Pure. An operation gets a number when it begins. It begins and ends here, which also moves its block
to the next state. The caller that begins an operation issues its action.

Invariant: a block that is not IDLE is registered with the one operation that moves it. (The blocks
of a compaction are in its run, kvd/core/state/compaction_run.py.)
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvd.core.records.extent_shape import ExtentShape
from kvd.core.state.block import Block
from kvd.core.state.extents import ExtentTable
from kvd.core.state.leases import LoadLease
from shared.types.units import ceil_div


@dataclass(slots=True, eq=False)
class Arrival:
    """An SSD read or a verification under way, and the leases that wait for it.

    Attributes:
        was_queued: the block was waiting to be written, and waits again once it is verified.
        is_ahead: it is a read for which no load waits yet.
        early: leases that were granted the block before its verification began. They do not wait,
            and end if the block is corrupt.
    """

    op_id: int
    block: Block
    was_queued: bool = False
    is_ahead: bool = False
    waiting: dict[int, LoadLease] = field(default_factory=dict)
    early: dict[int, LoadLease] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WriteOp:
    """An SSD write under way. It owns the extent until the block's entry is in the index."""

    block: Block
    extent: int
    num_sectors: int


@dataclass(slots=True, eq=False)
class Relocation:
    """A copy of an extent under way, so that the files can shrink; it owns the target.

    Attributes:
        block: the block that lies there.
        source: its extent.
        target: the extent to which it is copied.
        num_sectors: their length.
        is_void: the block has left the source: the copy may not be used.
    """

    block: Block
    source: int
    target: int
    num_sectors: int
    is_void: bool = False


class UnderWay:
    """The operations under way, by operation number. Every call is O(1).

    Attributes:
        reads: SSD reads.
        verifies: verifications, without those of scrubs, which the scrubber keeps.
        arrival_of: reads and verifications by block key.
        hashes: blocks that are being hashed, several by one operation.
        writes: SSD writes.
        drops: removals of entries, each with the extent and its sectors to free afterwards, if any.
        relocations: copies of extents.
        relocated: those of them that are not void, by the extent that is copied.
        replacements: changes of entries that name a copy now, each with the extent and sectors that
            they named before, to free afterwards.
        wipes: slots that are being zeroed.
    """

    def __init__(self) -> None:
        self.reads: dict[int, Arrival] = {}
        self.verifies: dict[int, Arrival] = {}
        self.arrival_of: dict[bytes, Arrival] = {}
        self.hashes: dict[int, Sequence[Block]] = {}
        self.writes: dict[int, WriteOp] = {}
        self.drops: dict[int, tuple[int, int] | None] = {}
        self.relocations: dict[int, Relocation] = {}
        self.relocated: dict[int, Relocation] = {}
        self.replacements: dict[int, tuple[int, int]] = {}
        self.wipes: dict[int, list[int]] = {}
        self._next_op_id = 1

    def next_op_id(self) -> int:
        """Return a number for a new operation."""
        self._next_op_id += 1
        return self._next_op_id - 1

    def begin_read(self, block: Block) -> Arrival:
        """Begin to read a block into the slot that it has."""
        return self._begin_arrival(block, "read", self.reads)

    def end_read(self, op_id: int) -> Arrival:
        """Remove a read that has ended, successfully or not."""
        return self._end_arrival(self.reads.pop(op_id), "read_done")

    def begin_verify(self, block: Block) -> Arrival:
        """Begin to compare a block's slot with its checksums."""
        return self._begin_arrival(block, "verify", self.verifies)

    def end_verify(self, op_id: int) -> Arrival:
        """Remove a verification that has ended, successfully or not."""
        return self._end_arrival(self.verifies.pop(op_id), "verify_done")

    def begin_hash(self, blocks: Sequence[Block]) -> int:
        """Begin to compute the checksums of blocks; return the operation."""
        for block in blocks:
            block.move("hash")
        op_id = self.next_op_id()
        self.hashes[op_id] = blocks
        return op_id

    def end_hash(self, op_id: int) -> Sequence[Block]:
        """Remove a hash operation that has ended; return its blocks."""
        blocks = self.hashes.pop(op_id)
        for block in blocks:
            block.move("hash_done")
        return blocks

    def begin_write(self, op: WriteOp) -> int:
        """Begin to write a block to its future extent; return the operation."""
        op.block.move("write")
        op_id = self.next_op_id()
        self.writes[op_id] = op
        return op_id

    def end_write(self, op_id: int) -> WriteOp:
        """Remove a write that has ended, successfully or not."""
        op = self.writes.pop(op_id)
        op.block.move("write_done")
        return op

    def begin_relocation(self, op: Relocation) -> int:
        """Begin to copy an extent; return the operation."""
        op_id = self.next_op_id()
        self.relocations[op_id] = self.relocated[op.source] = op
        return op_id

    def void_relocation(self, extent: int) -> None:
        """Record that a block has left its extent: a copy of it under way is void."""
        op = self.relocated.pop(extent, None)
        if op is not None:
            op.is_void = True

    def end_relocation(self, op_id: int) -> Relocation:
        """Remove a copy that has ended, successfully or not."""
        op = self.relocations.pop(op_id)
        if not op.is_void:
            del self.relocated[op.source]
        return op

    def _begin_arrival(self, block: Block, event: str, arrivals: dict[int, Arrival]) -> Arrival:
        block.move(event)
        arrival = Arrival(self.next_op_id(), block)
        arrivals[arrival.op_id] = self.arrival_of[block.key] = arrival
        return arrival

    def _end_arrival(self, arrival: Arrival, event: str) -> Arrival:
        del self.arrival_of[arrival.block.key]
        arrival.block.move(event)
        return arrival


class WriteQueue:
    """Dirty blocks that are to be written, oldest request first.

    A block is here from the request to write it until its write is issued. The number of extents
    that the blocks need is known at any moment; partial blocks share extents.

    Attributes:
        refused: dirty blocks that found no extent, oldest first. They do not wait.
    """

    def __init__(self, shape: ExtentShape, extents: ExtentTable) -> None:
        self._shape = shape
        self._extents = extents
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._num_whole = 0
        self._num_packed_sectors = 0
        self.refused: OrderedDict[bytes, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def holds(self, block: Block) -> bool:
        """Whether the block waits to be written."""
        return self._blocks.get(block.key) is block

    def add(self, block: Block) -> None:
        """Queue a block. It keeps its place if it waits already."""
        if not self.holds(block):
            self._blocks[block.key] = block
            self._count(block, 1)
        self.refused.pop(block.key, None)

    def refuse(self, block: Block) -> None:
        """Keep a block in DRAM only, for now."""
        self.discard(block)
        self.refused[block.key] = block

    def forget(self, block: Block) -> None:
        """Remove a block, whether it waits or was refused."""
        self.discard(block)
        self.refused.pop(block.key, None)

    def discard(self, block: Block) -> None:
        """Remove a block, if it waits."""
        if self.holds(block):
            del self._blocks[block.key]
            self._count(block, -1)

    @property
    def oldest(self) -> Block:
        """The block that is written next. The queue must not be empty."""
        return next(iter(self._blocks.values()))

    @property
    def newest(self) -> Block:
        """The block that is refused first. The queue must not be empty."""
        return next(reversed(self._blocks.values()))

    def num_short(self, num_freed: int) -> int:
        """Return how many whole extents are missing, if `num_freed` become free soon.

        It assumes that packed blocks fit without gaps, so it may be too low.
        """
        num_unpacked = self._num_packed_sectors - self._extents.num_free_packed
        num_needed = self._num_whole
        num_needed += ceil_div(max(0, num_unpacked), self._extents.sectors_per_extent)
        return max(0, num_needed - self._extents.num_free - num_freed)

    def _count(self, block: Block, sign: int) -> None:
        num_sectors = self._shape.num_sectors(block.num_tokens)
        if self._extents.is_packed(num_sectors):
            self._num_packed_sectors += sign * num_sectors
        else:
            self._num_whole += sign
