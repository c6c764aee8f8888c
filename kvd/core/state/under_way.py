"""UnderWay: the operations that the performer has yet to answer, and what becomes of their blocks.

Pure. Operations are numbered as they begin; each begins and ends here, and its block moves with it.
Who begins one issues its action.

Invariant: a block that is not IDLE is registered with the one operation that moves it.
"""

from dataclasses import dataclass, field

from kvd.core.state.block import Block
from kvd.core.state.leases import LoadLease


@dataclass(slots=True, eq=False)
class Arrival:
    """An SSD read or a verification under way, and the leases that wait for it.

    Attributes:
        was_queued: the block was to be written, and is again once it is verified.
        is_ahead: a read that no load has come to wait for.
        early: leases that were given the block before its verification began: they do not wait, and
            end if it turns out corrupt.
    """

    op_id: int
    block: Block
    was_queued: bool = False
    is_ahead: bool = False
    waiting: dict[int, LoadLease] = field(default_factory=dict)
    early: dict[int, LoadLease] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WriteOp:
    """An SSD write under way. The extent is the write's until its row is put."""

    block: Block
    extent: int
    num_sectors: int


class UnderWay:
    """See the module docstring. Every call is O(1).

    Attributes:
        reads: by operation.
        verifies: by operation; those of scrubs are the scrubber's.
        arrival_of: both, by block key.
        hashes: blocks that are hashed.
        writes: by operation.
        drops: removals of rows: the extent and sectors to be freed when the row is gone, if any.
        wipes: slots that are zeroed.
    """

    def __init__(self) -> None:
        self.reads: dict[int, Arrival] = {}
        self.verifies: dict[int, Arrival] = {}
        self.arrival_of: dict[bytes, Arrival] = {}
        self.hashes: dict[int, Block] = {}
        self.writes: dict[int, WriteOp] = {}
        self.drops: dict[int, tuple[int, int] | None] = {}
        self.wipes: dict[int, list[int]] = {}
        self._next_op_id = 1

    def next_op_id(self) -> int:
        """Number an operation."""
        self._next_op_id += 1
        return self._next_op_id - 1

    def begin_read(self, block: Block) -> Arrival:
        """Read a block into the slot that it has."""
        return self._begin_arrival(block, "read", self.reads)

    def end_read(self, op_id: int) -> Arrival:
        """Take a read out that has ended, however it did."""
        return self._end_arrival(self.reads.pop(op_id), "read_done")

    def begin_verify(self, block: Block) -> Arrival:
        """Compare a block's slot with its checksums."""
        return self._begin_arrival(block, "verify", self.verifies)

    def end_verify(self, op_id: int) -> Arrival:
        """Take a verification out that has ended, however it did."""
        return self._end_arrival(self.verifies.pop(op_id), "verify_done")

    def begin_hash(self, block: Block) -> int:
        """Compute a block's checksums; returns the operation."""
        block.move("hash")
        op_id = self.next_op_id()
        self.hashes[op_id] = block
        return op_id

    def end_hash(self, op_id: int) -> Block:
        """Take a hash out that has ended; returns its block."""
        block = self.hashes.pop(op_id)
        block.move("hash_done")
        return block

    def begin_write(self, op: WriteOp) -> int:
        """Write a block to its extent to be; returns the operation."""
        op.block.move("write")
        op_id = self.next_op_id()
        self.writes[op_id] = op
        return op_id

    def end_write(self, op_id: int) -> WriteOp:
        """Take a write out that has ended, however it did."""
        op = self.writes.pop(op_id)
        op.block.move("write_done")
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
