"""Write-through: dirty blocks to SSD, and what happens when SSD does not take them.

Pure. A block is in `unwritten` from the request until its write is issued. It waits there for an
extent (rows being dropped give theirs back) or, while the tier is degraded, for the next try.
Blocks for which no extent can be had are refused: they stay in DRAM only, until their session
stores again.
"""

from collections.abc import Iterable

from kvd.core.actions import SSD_DEGRADED, SSD_RECOVERED, IoOutcome, PutBlock, WriteBlock
from kvd.core.block import Block, BlockIo
from kvd.core.placement import Placement
from kvd.core.records import BlockRecord
from kvd.core.state import CacheState, WriteOp
from shared.session_key import SessionKey
from shared.units import NS_PER_S

FIRST_RETRY_NS = NS_PER_S  # after a failed write; doubles with each further failure
LAST_RETRY_NS = 64 * NS_PER_S


class Writer:
    """Issues and completes SSD writes of one cache state."""

    def __init__(self, state: CacheState, placement: Placement) -> None:
        self._state = state
        self._placement = placement
        self._retry_at_ns = 0
        self._retry_delay_ns = FIRST_RETRY_NS

    def request(self, key: SessionKey, blocks: Iterable[Block]) -> None:
        """Have the dirty ones of a session's blocks written; sessions colder than it make room."""
        state = self._state
        if not len(state.extents):
            return
        for block in blocks:
            if block.dirty and block.io is BlockIo.IDLE:
                state.unwritten.setdefault(block.key, block)
        if not self._is_holding_back():
            self._placement.make_extents(self._num_short(), key)
            for _ in range(self._num_short()):
                state.unwritten.popitem()
                state.outbox.count("ssd_refused")
        self.issue()

    def issue(self) -> None:
        """Issue the writes that extents can be had for."""
        state = self._state
        if self._is_holding_back():
            return
        while state.unwritten and state.extents.num_free:
            block = state.unwritten.pop(next(iter(state.unwritten)))
            assert block.slot_id is not None, "an unwritten block is in DRAM"
            op_id, extent = state.next_op_id(), state.extents.allocate()
            block.io = BlockIo.WRITING
            state.writes[op_id] = WriteOp(block, extent)
            state.outbox.add(WriteBlock(op_id, block.slot_id, extent, block.num_tokens))

    def retry_at_ns(self) -> int | None:
        """When held-back writes are to be tried again; None if time alone would not help them."""
        state = self._state
        is_held_back = state.ssd_degraded and state.unwritten and state.extents.num_free
        return self._retry_at_ns if is_held_back else None

    def write_done(self, op_id: int, outcome: IoOutcome, checksums: tuple[int, ...]) -> None:
        """See CacheEngine.write_done."""
        state = self._state
        op = state.writes.pop(op_id)
        block = op.block
        block.io = BlockIo.IDLE
        if outcome is not IoOutcome.OK:
            self._degrade(outcome)
            state.extents.free(op.extent)
            state.unwritten[block.key] = block
        elif block.wanted:
            self._recover()
            state.blocks.enter_ssd(block, op.extent, checksums)
            record = BlockRecord(block.key, block.token_ids, block.num_tokens, op.extent, checksums)
            state.outbox.add(PutBlock(record))
        else:
            state.extents.free(op.extent)
        state.settle(block)
        state.outbox.space_freed()
        self.issue()

    def drop_done(self, op_id: int) -> None:
        """See CacheEngine.drop_done."""
        extent = self._state.drops.pop(op_id)
        if extent is not None:
            self._state.extents.free(extent)
        self.issue()

    def _num_short(self) -> int:
        """Unwritten blocks beyond the extents that are free or about to be."""
        state = self._state
        return max(0, len(state.unwritten) - state.extents.num_free - len(state.drops))

    def _is_holding_back(self) -> bool:
        return bool(self._state.ssd_degraded) and self._state.now_ns < self._retry_at_ns

    def _degrade(self, outcome: IoOutcome) -> None:
        """Hold writes back for a while; failures of one volley count once."""
        state = self._state
        state.outbox.count("write_errors")
        if self._is_holding_back():
            return
        if not state.ssd_degraded:
            state.outbox.emit(SSD_DEGRADED, None, {"why": outcome.value})
            self._retry_delay_ns = FIRST_RETRY_NS
        state.ssd_degraded = outcome.value
        self._retry_at_ns = state.now_ns + self._retry_delay_ns
        self._retry_delay_ns = min(2 * self._retry_delay_ns, LAST_RETRY_NS)

    def _recover(self) -> None:
        if self._state.ssd_degraded:
            self._state.ssd_degraded = ""
            self._state.outbox.emit(SSD_RECOVERED, None)
