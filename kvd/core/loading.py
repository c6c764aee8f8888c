"""Loads: from tokens to leased slots, over SSD reads where needed.

Pure. Invariants: 1. an entry of a load lease counts once in its block's `readers`; 2. `num_waiting`
is the number of entries whose block is READING, and the lease is in exactly these reads' `waiting`;
3. loading creates no session.
"""

from kvd.core.actions import BLOCK_CORRUPT, READ_FAILED, IoOutcome, LeaseReady, ReadBlock
from kvd.core.block import Block, BlockIo
from kvd.core.leases import LoadLease
from kvd.core.matching import Piece, check_from_token, match_tokens, num_tokens_of, slice_tokens
from kvd.core.placement import Placement
from kvd.core.records import LeaseState, LoadAnswer, LoadSpan, Lookup, Tier
from kvd.core.state import CacheState, ReadOp
from shared.session_key import SessionKey

BUSY = "busy"
CORRUPT = "corrupt"
READ_ERROR = "read_error"
DEADLINE = "deadline"


class Loader:
    """Prepares, settles and completes loads of one cache state."""

    def __init__(self, state: CacheState, placement: Placement) -> None:
        self._state = state
        self._placement = placement

    def prepare(self, key: SessionKey, token_ids: bytes, from_token: int, owner: int) -> LoadAnswer:
        """See CacheEngine.prepare_load."""
        check_from_token(from_token, num_tokens_of(token_ids))
        state = self._state
        session = state.sessions.get(key)
        if session is not None:
            state.touch(session)
        match = match_tokens(state, key, token_ids)
        pieces = [piece for piece in match.pieces if piece.end > from_token]
        if not pieces:
            state.outbox.count("load_misses")
            return LoadAnswer(Lookup.MISS, miss_reason=match.miss_reason)
        lease = LoadLease(state.leases.next_id(), owner, key, from_token, entries=[], more=False)
        self._lease_pieces(lease, pieces, token_ids)
        if not lease.entries:
            state.outbox.count("loads_busy")
            state.outbox.want_wake()
            return LoadAnswer(Lookup.MISS, miss_reason=BUSY)
        lease.more = len(lease.entries) < len(pieces)
        state.leases.add(lease)
        return self._granted(lease, Lookup.PENDING) if lease.num_waiting else self._hit(lease)

    def state_of(self, lease_id: int) -> LeaseState:
        """See CacheEngine.lease_state."""
        lease = self._state.leases.get(lease_id)
        if not isinstance(lease, LoadLease):
            return LeaseState.LOST
        return LeaseState.PENDING if lease.num_waiting else LeaseState.READY

    def settle(self, lease_id: int) -> LoadAnswer:
        """See CacheEngine.settle_load."""
        lease = self._state.leases.load_of(lease_id)
        if lease.num_waiting:
            first = next(
                i for i, (block, _) in enumerate(lease.entries) if block.io is BlockIo.READING
            )
            self._cut(lease, first, DEADLINE)
        if lease.entries:
            return self._hit(lease)
        failure = lease.failure
        self.release(lease)
        self._state.outbox.count("load_misses")
        return LoadAnswer(Lookup.MISS, miss_reason=failure)

    def complete(self, lease_id: int, owner: int) -> None:
        """See CacheEngine.complete_load."""
        lease = self._state.leases.load_of(lease_id, owner)
        self.release(lease)
        session = self._state.sessions.get(lease.key)
        if session is not None:
            self._state.touch(session)
            self._state.outbox.session_changed(session.key)

    def release(self, lease: LoadLease) -> None:
        """End a lease; reads under way go on and serve the cache."""
        if lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))
        self._state.leases.remove(lease)
        self._cut(lease, 0, "")

    def read_done(self, op_id: int, outcome: IoOutcome) -> None:
        """See CacheEngine.read_done."""
        state = self._state
        op = state.reads.pop(op_id)
        block = op.block
        del state.read_of[block.key]
        block.io = BlockIo.IDLE
        if outcome is IoOutcome.OK:
            assert block.slot_id is not None, "a block keeps its slot while it is read"
            state.slots.commit(block.slot_id)
            for lease in op.waiting.values():
                self._arrived(lease)
            state.outbox.space_freed()
            state.settle(block)
        else:
            self._read_failed(op, outcome)

    # -------------------------------------------------------------------------------------- inside

    def _lease_pieces(self, lease: LoadLease, pieces: list[Piece], token_ids: bytes) -> None:
        """Lease as many blocks as slots can be had for, in token order.

        What is leased already is never evicted. All matched blocks are held meanwhile: making room
        for one must not drop another.
        """
        for piece in pieces:
            piece.block.holders += 1
        for index, piece in enumerate(pieces):
            block = piece.block
            tier = (
                Tier.DRAM
                if block.slot_id is not None and block.io is not BlockIo.READING
                else Tier.SSD
            )
            if block.slot_id is None:
                if not self._has_slot(pieces[index:]):
                    break
                self._start_read(block)
            if piece.span.num_tokens == block.num_tokens:
                block.token_ids = slice_tokens(token_ids, piece.token_offset, piece.end)
            if block.io is BlockIo.READING:
                self._wait_for(lease, block)
            block.readers += 1
            lease.entries.append((block, _load_span(piece, lease.from_token, tier)))
        for piece in pieces:
            piece.block.holders -= 1
            self._state.settle(piece.block)

    def _has_slot(self, pieces: list[Piece]) -> bool:
        if self._state.slots.num_free:
            return True
        num_wanted = sum(piece.block.slot_id is None for piece in pieces)
        return self._placement.make_slots(num_wanted) > 0

    def _start_read(self, block: Block) -> None:
        state = self._state
        assert block.extent is not None, "a block without a slot is on SSD"
        slot_id, generation = state.slots.allocate()
        state.blocks.enter_dram(block, slot_id, generation)
        block.io = BlockIo.READING
        op_id = state.next_op_id()
        state.reads[op_id] = state.read_of[block.key] = ReadOp(block)
        state.outbox.add(ReadBlock(op_id, block.extent, slot_id, block.num_tokens, block.checksums))

    def _wait_for(self, lease: LoadLease, block: Block) -> None:
        waiting = self._state.read_of[block.key].waiting
        lease.num_waiting += lease.lease_id not in waiting
        waiting[lease.lease_id] = lease

    def _arrived(self, lease: LoadLease) -> None:
        lease.num_waiting -= 1
        if not lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))

    def _read_failed(self, op: ReadOp, outcome: IoOutcome) -> None:
        """Cut the leases that wait; a corrupt block is lost, any other is still on SSD."""
        state, block = self._state, op.block
        is_corrupt = outcome is IoOutcome.CORRUPT
        state.leave_dram(block)
        for lease in op.waiting.values():
            first = next(i for i, (entry, _) in enumerate(lease.entries) if entry is block)
            self._cut(lease, first, CORRUPT if is_corrupt else READ_ERROR)
            self._arrived(lease)
        state.outbox.count("blocks_corrupt" if is_corrupt else "read_errors")
        event = BLOCK_CORRUPT if is_corrupt else READ_FAILED
        fields = {"block": block.key.hex(), "num_sessions": str(len(block.users))}
        state.outbox.emit(event, block.last_user, fields)
        if is_corrupt:
            state.cut_users(block, CORRUPT)
            if state.blocks.holds(block):
                state.forget(block)
        else:
            state.settle(block)

    def _cut(self, lease: LoadLease, num_entries: int, failure: str) -> None:
        """Keep the lease's first entries and let go of the others."""
        kept, released = lease.entries[:num_entries], lease.entries[num_entries:]
        lease.entries, lease.more, lease.failure = kept, False, failure
        still_needed = {block.key for block, _ in kept}
        for block, _ in released:
            block.readers -= 1
            if block.io is BlockIo.READING and block.key not in still_needed:
                waiting = self._state.read_of[block.key].waiting
                lease.num_waiting -= waiting.pop(lease.lease_id, None) is not None
        for block, _ in reversed(released):
            self._state.settle(block)
        self._state.outbox.space_freed()

    def _granted(self, lease: LoadLease, lookup: Lookup) -> LoadAnswer:
        spans = tuple(span for _, span in lease.entries)
        end_token = spans[-1].token_offset + spans[-1].num_tokens
        return LoadAnswer(lookup, lease.lease_id, spans, end_token, lease.more)

    def _hit(self, lease: LoadLease) -> LoadAnswer:
        self._state.outbox.count("load_hits")
        for _, span in lease.entries:
            self._state.outbox.count(f"load_tokens_{span.tier.value}", span.num_tokens)
        return self._granted(lease, Lookup.HIT)


def _load_span(piece: Piece, from_token: int, tier: Tier) -> LoadSpan:
    """The rows of the piece from `from_token` on; its block has its slot."""
    assert piece.block.slot_id is not None, "spans are granted on blocks with a slot"
    num_skipped = max(0, from_token - piece.token_offset)
    return LoadSpan(
        slot_id=piece.block.slot_id,
        start=piece.span.start + num_skipped,
        num_tokens=piece.span.num_tokens - num_skipped,
        token_offset=piece.token_offset + num_skipped,
        tier=tier,
        generation=piece.block.generation,
    )
