"""Relocation: move blocks that lie behind the end of the SSD tier, so that its files can shrink.

Pure. When the tier gets smaller, the eviction order says which sessions stay
(`Writer.set_capacity`), wherever they lie. Those of their blocks that lie behind the new end are
copied to free extents before it, a few at a time: extent → extent, as they are, without a slot. So
it needs no arena, and no tenant's key. Until then they are served from where they are. The files
are cut to `end` whole extents, once nothing behind that is named by an entry any more.

    copy (RelocateBlock) ─► durable ─► the entry names the copy (ReplaceBlock) ─► committed: the old
                                                                                  extent is free
Invariants:
1. a kvd that starts after a kill finds a block in its old place or in the new one, and both hold
   its bytes: the copy is durable before the entry names it, and the old extent is neither reused
   nor cut off before that is committed;
2. a copy is used only if the block still lies where it was copied from, and is not being read from
   there. Otherwise it is dropped, and made again later if it is still needed;
3. a block that is being copied keeps its last copy, and is not packed (Block.holders).

A restart in between begins again with what is left. What cannot be copied now is tried again later.
"""

from collections.abc import Iterator

from kvd.core.io.verifying import CORRUPT, report_corrupt
from kvd.core.io.writing import Writer
from kvd.core.records.actions import IoOutcome, RelocateBlock, ReplaceBlock
from kvd.core.records.entries import BlockRecord, highest_extent
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.under_way import Relocation
from shared.types.units import MIB, NS_PER_S, SECTOR_BYTES

MAX_BYTES = 64 * MIB  # of copies under way: enough to keep a disk busy
STEPS = 256  # sessions and blocks looked at per call, so that one call stays short
FIRST_PAUSE_NS = NS_PER_S  # from one look at all sessions to the next
LAST_PAUSE_NS = 256 * NS_PER_S  # it doubles with each look at which nothing could be moved


class Relocator:
    """Relocates the blocks of one cache state."""

    def __init__(self, state: CacheState, writer: Writer) -> None:
        self._state = state
        self._writer = writer
        self._steps: Iterator[bool] | None = None  # None: no look is under way
        self._has_no_place = False  # for the next block, until an operation under way frees one
        self._next_look_ns: int | None = None  # None: nothing lies behind the end
        self._pause_ns = FIRST_PAUSE_NS
        self._is_over = self._has_moved = False
        self._copied_bytes = 0  # of copies under way

    def end(self) -> int | None:
        """Return how many whole extents the files must have to hold all that is in use.

        0: no more than the capacity. None: as many as they have, because entries of unknown places
        are being removed, and a kvd that starts before that is committed must find these.
        """
        state = self._state
        if None in state.under_way.drops.values():
            return None
        return state.extents.trim() if state.extents.num_surplus else 0

    def look(self) -> None:
        """Begin to look for blocks behind the end if that is due, after a change of capacity too.

        Call it after each change of the capacity, and at `next_deadline_ns`.
        """
        state = self._state
        if state.extents.num_surplus:
            state.extents.trim()
        if not state.extents.num_surplus or self._is_over:
            self._end_look(None)
        elif self._steps is None and state.now_ns >= (self._next_look_ns or 0):
            self._steps = self._look_at_all()
            self._next_look_ns = state.now_ns

    def next_deadline_ns(self) -> int | None:
        """Return when to call `look` and then `resume`; None: not before another call."""
        return None if self._has_no_place or self._is_waiting() else self._next_look_ns

    def resume(self) -> None:
        """Copy more blocks, up to MAX_BYTES at a time; a bounded number of steps per call."""
        for _ in range(STEPS):
            if self._steps is None or self._is_waiting():
                return
            has_place = next(self._steps, None)
            ops = self._state.under_way
            is_freeing = bool(ops.drops or ops.relocations or ops.replacements)
            self._has_no_place = has_place is False and is_freeing
            if self._has_no_place:
                return  # until one of them frees a place
            if not has_place:
                self._rest()

    def stop(self) -> None:
        """Begin no copies any more: kvd shuts down."""
        self._is_over = True
        self._end_look(None)

    def relocate_done(self, op_id: int, outcome: IoOutcome) -> None:
        """Take the outcome of a RelocateBlock; OK means that the copy is durable."""
        state = self._state
        op = state.under_way.end_relocation(op_id)
        self._copied_bytes -= op.num_sectors * SECTOR_BYTES
        block = op.block
        block.holders -= 1
        is_wanted = not op.is_void and state.blocks.holds(block) and block.is_needed
        is_wanted &= block.io is not BlockIo.READING
        if outcome is IoOutcome.OK and is_wanted:
            self._replace(op)
        else:
            state.extents.end_relocation(op.target, op.num_sectors)
        if outcome is IoOutcome.CORRUPT:
            if is_wanted:
                self._drop_copy(block)
        elif outcome is not IoOutcome.OK:
            state.outbox.count("write_errors")
            if self._steps is not None:  # else this pause is under way already
                self._rest()
        state.settle(block)
        state.outbox.on_space_freed()

    def replace_done(self, op_id: int) -> None:
        """Take the completion of a ReplaceBlock: the extent that the entry named before is free."""
        self._state.extents.end_relocation(*self._state.under_way.replacements.pop(op_id))

    # -------------------------------------------------------------------------------------- private

    def _is_waiting(self) -> bool:
        """Whether a completion has to come before there is anything to do."""
        is_looking = self._steps is not None
        return is_looking and (self._copied_bytes >= MAX_BYTES or self._writer.is_holding_back())

    def _rest(self) -> None:
        """Look at all sessions again after a while, if anything lies behind the end then."""
        self._pause_ns = FIRST_PAUSE_NS if self._has_moved else self._pause_ns
        self._has_moved = False
        self._end_look(self._state.now_ns + self._pause_ns)
        self._pause_ns = min(2 * self._pause_ns, LAST_PAUSE_NS)

    def _end_look(self, next_look_ns: int | None) -> None:
        self._steps, self._has_no_place = None, False
        self._next_look_ns = next_look_ns

    def _look_at_all(self) -> Iterator[bool]:
        """Copy the blocks behind the end, step by step; a step is a session or one of its blocks.

        Those of a session come last ones first: what is before a block that is being copied is not
        packed, and what is behind it is done.

        Yields:
            False if there is no place for the next block, which is tried again then.
        """
        state = self._state
        for key in list(state.sessions):
            yield True
            session = state.sessions.get(key)
            if session is None or not self._lies_behind(session):
                continue
            state.tails.unpack(session)
            for block_key in reversed(session.block_keys()):
                while not self._copy(session, block_key):
                    yield False
                yield True

    def _lies_behind(self, session: Session) -> bool:
        """Whether a session has blocks behind the end, packed or not."""
        blocks, extents = self._state.blocks, self._state.extents
        if extents.is_behind(highest_extent(session.packed)):
            return True
        own = (blocks[span.block_key].extent for span in session.spans)
        return any(extent is not None and extents.is_behind(extent) for extent in own)

    def _copy(self, session: Session, block_key: bytes) -> bool:
        """Begin to copy a block if it lies behind the end; return False if there is no place.

        A block that is being read is left for the next look.
        """
        state = self._state
        block = state.find_block(block_key)
        if block is None and session.packed:  # it was packed meanwhile
            state.tails.unpack(session)
            block = state.blocks.get(block_key)
        if block is None or block.extent is None or block.io is BlockIo.READING:
            return True
        if not state.extents.is_behind(block.extent) or block.extent in state.under_way.relocated:
            return True
        num_sectors = state.shape.num_sectors(block.num_tokens)
        if not state.extents.can_relocate(num_sectors):
            return False
        target = state.extents.relocate(num_sectors)
        op = Relocation(block, block.extent, target, num_sectors)
        op_id = state.under_way.begin_relocation(op)
        self._copied_bytes += num_sectors * SECTOR_BYTES
        block.holders += 1
        state.outbox.add(RelocateBlock(op_id, block.extent, target, block.num_tokens))
        return True

    def _replace(self, op: Relocation) -> None:
        """Let a block lie where it was copied to; the old extent is free once that is committed."""
        state, block = self._state, op.block
        self._has_moved = True
        state.blocks.enter_ssd(block, op.target)
        state.scrubbed.pop((Tier.SSD, op.source), None)
        op_id = state.under_way.next_op_id()
        state.under_way.replacements[op_id] = (op.source, op.num_sectors)
        record = BlockRecord(block.key, op.target, block.num_tokens)
        state.outbox.index.add(ReplaceBlock(op_id, record))
        state.outbox.count("relocated_bytes", op.num_sectors * SECTOR_BYTES)

    def _drop_copy(self, block: Block) -> None:
        """Drop the copy of a block on SSD, which is not there; without another, it is lost."""
        state = self._state
        report_corrupt(state, block, Tier.SSD)
        if block.slot_id is None:
            state.lose(block, CORRUPT)
        else:
            state.leave_ssd(block)
            self._writer.rewrite(block)
