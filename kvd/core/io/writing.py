"""SSD writes: which dirty blocks are written and when, and what happens when SSD fails or is full.

Pure. The write policy (setting `ssd.admission`) says when a dirty, hashed block is queued for
writing:

    write_through   at once
    write_back      when its session has not been used for a while, or too much is dirty
    on_evict        when its slot is needed; so it is under the other policies (a *demotion*)

Writes are issued when the actions are drained, by `resume`, or sooner if room depends on them. A
queued block waits for an extent (entries that are being dropped give theirs back), for writes under
way (`max_write_bytes`), for an index that is far behind or, while the tier is degraded, for the
next try. Blocks for which there is no extent are refused: they stay in DRAM only, until extents are
free that nothing else waits for, their session stores again, or their slots are needed. A partial
block at a session's end that is replaced before its write is due is never written.
"""

from collections.abc import Iterable

from kvd.core.io.placement import Placement
from kvd.core.records.actions import SSD_DEGRADED, SSD_RECOVERED, IoOutcome, PutBlock, WriteBlock
from kvd.core.records.entries import BlockRecord
from kvd.core.records.tier import Admission
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from kvd.core.state.under_way import WriteOp
from shared.types.units import NS_PER_S, SECTOR_BYTES

FIRST_RETRY_NS = NS_PER_S  # after a failed write; doubles with each further failure
LAST_RETRY_NS = 64 * NS_PER_S
MAX_RESTING_SHARE = 0.5  # largest share of slots with blocks that rest before their write-back
WRITE_BACK_BATCH = 64  # sessions per call, so that one call stays short
FAR_FUTURE_NS = 1 << 62


class Writer:
    """Issues and completes SSD writes of one cache state."""

    def __init__(self, state: CacheState, placement: Placement) -> None:
        self._state = state
        self._placement = placement
        self._resting = state.make_clock()  # sessions with blocks to write back, by due time
        self._issued_bytes = 0
        self._retry_at_ns = 0
        self._retry_delay_ns = FIRST_RETRY_NS
        self._writes_all = False  # see write_all
        self._watermark_checked_at: int | None = None  # Outbox.num_freed then

    # --------------------------------------------------------------------------------- write policy

    def admit(self, block: Block, *, was_queued: bool = False) -> None:
        """Queue a dirty block for writing when the write policy says so, if it can be written.

        A block that was queued before is queued again under every policy.
        """
        state = self._state
        if not len(state.extents) or not state.blocks.holds(block) or not block.writable:
            return
        is_due = was_queued or self._writes_all
        if is_due or state.limits.admission is Admission.WRITE_THROUGH:
            self._queue((block,))
        elif state.limits.admission is Admission.WRITE_BACK and block.last_user in state.sessions:
            session = state.sessions[block.last_user]
            self._resting.schedule(session.key, self._write_back_at_ns(session))
            self._write_back_excess()

    def admit_all(self, blocks: Iterable[Block]) -> None:
        """Call `admit` for each of the blocks."""
        for block in blocks:
            self.admit(block)

    def write_back(self) -> None:
        """Queue the blocks of sessions whose write-back is due; a bounded number per call."""
        for _ in range(WRITE_BACK_BATCH):
            session = self._pop_resting(self._state.now_ns)
            if session is None:
                break
            self._queue_session(session)

    def make_slots(self, num_wanted: int) -> int:
        """Make room in DRAM for `num_wanted` blocks, as far as possible.

        Clean blocks are evicted. If they do not suffice, dirty ones are written in the same order,
        and their slots become free later (`write_done`). Dirty blocks are evicted unwritten only if
        SSD cannot take them.

        Returns:
            How many slots are free now.
        """
        state = self._state
        is_without_ssd = not len(state.extents) or bool(state.ssd_degraded)
        num_free = self._placement.evict(num_wanted, may_cut=is_without_ssd)
        if num_free < num_wanted and not is_without_ssd:
            self._demote(num_wanted - num_free - len(state.under_way.writes))
            if not state.is_cleaning():
                num_free = self._placement.evict(num_wanted, may_cut=True)
        return num_free

    def keep_free(self) -> None:
        """Keep the watermark of free slots: evict clean blocks, and write resting dirty ones.

        No dirty block is evicted for it. If slots are still missing, it is tried again only after
        something has been freed. While an erasure zeroes free slots it waits for these.
        """
        state = self._state
        if state.under_way.wipes:
            return
        num_short = state.num_kept_free - state.slots.num_free
        if num_short <= 0 or self._watermark_checked_at == state.outbox.num_freed:
            return
        self._placement.evict_clean(num_short)
        num_short = state.num_kept_free - state.slots.num_free - len(state.under_way.writes)
        is_resting = state.limits.admission is not Admission.WRITE_THROUGH
        if is_resting and len(state.extents) and not state.ssd_degraded:
            self._demote(num_short)
        self._watermark_checked_at = state.outbox.num_freed

    def on_watermark_change(self) -> None:
        """Check the watermark again at the next `keep_free`."""
        self._watermark_checked_at = None

    def on_admission_change(self) -> None:
        """Admit every dirty block again under the new write policy; O(blocks)."""
        for block in list(self._state.blocks):
            self.admit(block)

    def rewrite(self, block: Block) -> None:
        """Queue a block whose copy on SSD was corrupt, under every policy."""
        self._queue((block,))

    def write_all(self) -> None:
        """Queue every dirty block that can be written; O(blocks).

        From now on others, such as those being hashed or verified, are queued as soon as possible.
        """
        self._writes_all = True
        self._queue(self._state.blocks)

    def set_capacity(self, num_extents: int) -> None:
        """Set the number of extents; if there are fewer than are used, evict sessions from SSD."""
        state = self._state
        state.extents.set_capacity(num_extents)
        num_over = state.extents.num_over - len(state.under_way.drops)
        self._placement.make_extents(num_over, None)
        if state.ssd_degraded == IoOutcome.FULL.value:
            self._retry_at_ns = state.now_ns  # there may be room now
        self._make_extents()

    # --------------------------------------------------------------------------------------- writes

    def _issue(self) -> None:
        """Issue queued writes as far as there are extents, up to `max_write_bytes` under way."""
        state = self._state
        if self.is_holding_back():
            return
        while len(state.unwritten) and self._issued_bytes < state.limits.max_write_bytes:
            block = state.unwritten.oldest
            num_sectors = state.shape.num_sectors(block.num_tokens)
            if not state.extents.can_allocate(num_sectors):
                break
            state.unwritten.discard(block)
            self._write(block, WriteOp(block, state.extents.allocate(num_sectors), num_sectors))

    def next_deadline_ns(self) -> int | None:
        """Return when to call `write_back`; None if nothing waits for a time."""
        due_ns = self._resting.next_deadline_ns()
        if not self._is_resting() or not len(self._state.unwritten):
            return due_ns
        return self._retry_at_ns if due_ns is None else min(due_ns, self._retry_at_ns)

    def resume(self) -> None:
        """Issue queued and refused writes.

        If a queued block waits for an extent and nothing under way will free one, make room again.
        """
        state = self._state
        self._issue()
        if len(state.unwritten) and not state.under_way.drops and not state.under_way.writes:
            self._make_extents()
            self._issue()
        self._retry_refused()

    def write_done(self, op_id: int, outcome: IoOutcome) -> None:
        """Take the outcome of a WriteBlock; OK means that the block is durable."""
        state = self._state
        op = state.under_way.end_write(op_id)
        self._issued_bytes -= op.num_sectors * SECTOR_BYTES
        block = op.block
        is_kept = state.blocks.holds(block) and block.is_needed
        if outcome is not IoOutcome.OK:
            self._degrade(outcome)
        else:
            self._recover()
        if outcome is IoOutcome.OK and is_kept:
            state.blocks.enter_ssd(block, op.extent)
            state.record_block_move(block, MoveKind.WRITTEN)
            state.outbox.count("ssd_written_bytes", op.num_sectors * SECTOR_BYTES)
            state.outbox.index.add(PutBlock(BlockRecord(block.key, op.extent, block.num_tokens)))
        else:
            state.extents.free(op.extent, op.num_sectors)
            if is_kept:
                state.unwritten.add(block)
        state.settle(block)
        state.outbox.on_space_freed()

    def drop_done(self, op_id: int) -> None:
        """Take the completion of a DropBlock: its entry is gone, and its extent is free."""
        run = self._state.under_way.drops.pop(op_id)
        if run is not None:
            self._state.extents.free(*run)

    # -------------------------------------------------------------------------------------- private

    def _write(self, block: Block, op: WriteOp) -> None:
        """Begin the write of a block and issue its action."""
        state = self._state
        assert block.slot_id is not None, "an unwritten block is in DRAM"
        op_id = state.under_way.begin_write(op)
        self._issued_bytes += op.num_sectors * SECTOR_BYTES
        action = WriteBlock(
            op_id,
            block.key,
            block.slot_id,
            op.extent,
            block.num_tokens,
            block.token_ids,
            block.checksums,
            block.tenant,
        )
        state.outbox.add(action)

    def _retry_refused(self) -> None:
        """Write refused blocks, as far as there are extents that no queued block waits for."""
        state = self._state
        while state.unwritten.refused and not len(state.unwritten) and not self.is_holding_back():
            block = next(iter(state.unwritten.refused.values()))
            if not state.extents.can_allocate(state.shape.num_sectors(block.num_tokens)):
                return
            state.unwritten.forget(block)
            if block.writable:
                state.unwritten.add(block)
                self._issue()

    def _queue(self, blocks: Iterable[Block]) -> int:
        """Queue those of the blocks that can be written; returns how many are new in the queue."""
        queue = self._state.unwritten
        num_before = len(queue)
        for block in blocks:
            if block.writable:
                queue.add(block)
        num_queued = len(queue) - num_before
        if num_queued:
            self._make_extents()
        return num_queued

    def _queue_session(self, session: Session) -> None:
        blocks = (self._state.blocks.get(key) for key in session.block_keys())
        self._queue(block for block in blocks if block is not None)

    def _make_extents(self) -> None:
        """Evict from SSD for the queued blocks, and refuse those that find no extent.

        Only sessions are evicted that rank below the newest block's session.
        """
        state = self._state
        if self.is_holding_back() or not len(state.unwritten):
            return
        self._placement.make_extents(self._num_short(), state.unwritten.newest.last_user)
        while len(state.unwritten) and self._num_short():
            block = state.unwritten.newest
            state.unwritten.refuse(block)
            state.outbox.count("ssd_refused")

    def _num_short(self) -> int:
        """Return how many whole extents the queue lacks."""
        state = self._state
        num_short = state.unwritten.num_short(len(state.under_way.drops))
        if num_short or state.under_way.drops or state.under_way.writes:
            return num_short
        # No extent will be freed, so a partial block must fit into the free sectors as they are.
        num_sectors = state.shape.num_sectors(state.unwritten.oldest.num_tokens)
        return int(not state.extents.can_allocate(num_sectors))

    def _demote(self, num_slots: int) -> None:
        """Write the dirty blocks that would be evicted next, so that their slots become free."""
        blocks = self._placement.dirty_to_evict(num_slots)
        self._state.outbox.count("demotions", self._queue(blocks))
        self._issue()

    def _write_back_at_ns(self, session: Session) -> int:
        return session.last_access_ns + self._state.limits.write_back_delay_ns

    def _write_back_excess(self) -> None:
        """Write back early while too many blocks rest, the least recently used sessions first."""
        state = self._state
        while self._num_resting() > MAX_RESTING_SHARE * len(state.slots):
            session = self._pop_resting(FAR_FUTURE_NS)
            if session is None:
                return
            self._queue_session(session)

    def _num_resting(self) -> int:
        """Return how many dirty blocks are neither being hashed nor written nor queued."""
        state = self._state
        num_on_the_way = (
            len(state.unwritten) + len(state.under_way.writes) + state.blocks.num_unhashed
        )
        return state.blocks.num_dirty - num_on_the_way

    def _pop_resting(self, until_ns: int) -> Session | None:
        """Remove and return the session whose write-back is due first, if that is by `until_ns`."""
        while (due_ns := self._resting.next_deadline_ns()) is not None and due_ns <= until_ns:
            key = self._resting.pop_due(due_ns)
            session = None if key is None else self._state.sessions.get(key)
            if session is None:
                continue
            at_ns = self._write_back_at_ns(session)
            if at_ns <= due_ns:
                return session
            self._resting.schedule(session.key, at_ns)  # it was used meanwhile
        return None

    def is_holding_back(self) -> bool:
        """Whether writes are held back: the tier is degraded, or its index is far behind."""
        return self._state.outbox.index.is_far_behind or self._is_resting()

    def _is_resting(self) -> bool:
        """Whether the pause after a failed write is not over yet."""
        return self._state.now_ns < self._retry_at_ns

    def _degrade(self, outcome: IoOutcome) -> None:
        """Hold writes back for a while; failures during the pause do not prolong it."""
        state = self._state
        state.outbox.count("write_errors")
        if self._is_resting():
            return
        if not state.ssd_degraded:
            state.outbox.emit(SSD_DEGRADED, None, {"why": outcome.value})
        state.ssd_degraded = outcome.value
        self._retry_at_ns = state.now_ns + self._retry_delay_ns
        self._retry_delay_ns = min(2 * self._retry_delay_ns, LAST_RETRY_NS)

    def _recover(self) -> None:
        if self._state.ssd_degraded:
            self._state.ssd_degraded, self._retry_at_ns = "", self._state.now_ns
            self._retry_delay_ns = FIRST_RETRY_NS
            self._state.outbox.emit(SSD_RECOVERED, None)
