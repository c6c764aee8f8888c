"""Loads: from tokens to leased slots, over SSD reads and verifications where needed.

Pure. Invariants: 1. an entry of a load lease counts once in its block's `readers`; 2. `num_waiting`
is the number of its blocks that are READING or VERIFYING, and the lease is in exactly these
arrivals' `waiting`; 3. loading creates no session; 4. a lease that was PENDING is tracked by a
progress word until it ends.
"""

from itertools import takewhile

from kvd.core.io.reading import Reader
from kvd.core.io.verifying import CORRUPT, Verifier, report_corrupt
from kvd.core.io.writing import Writer
from kvd.core.operations import exporting
from kvd.core.operations.exporting import Export
from kvd.core.operations.matching import Piece, check_from_token, match_tokens, num_tokens_of
from kvd.core.records.actions import (
    READ_FAILED,
    IoOutcome,
    LeaseReady,
    TrackLoad,
    UntrackLoad,
)
from kvd.core.records.records import LeaseState, LoadAnswer, LoadSpan, Lookup, Tier
from kvd.core.records.rows import StoredBlock
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LeasePhase, LoadLease, move
from kvd.core.state.session_history import MoveKind
from kvd.core.state.under_way import Arrival
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey

BUSY = "busy"
READ_ERROR = "read_error"
DEADLINE = "deadline"
ON_SSD = "on_ssd"


class Loader:
    """Prepares, settles and completes loads of one cache state."""

    def __init__(
        self, state: CacheState, reader: Reader, writer: Writer, verifier: Verifier
    ) -> None:
        self._state = state
        self._reader = reader
        self._writer = writer
        self._verifier = verifier

    def prepare(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        owner: int,
        lineage: Lineage | None,
        *,
        dram_only: bool,
    ) -> LoadAnswer:
        """See CacheEngine.prepare_load."""
        check_from_token(from_token, num_tokens_of(token_ids))
        state = self._state
        session = state.sessions.get(key)
        if session is not None:
            state.touch(session)
        match = match_tokens(state, key, token_ids, lineage)
        if session is not None and session.lineage is None and match.covers(session):
            session.lineage = lineage
        stored = [piece for piece in match.pieces if piece.end > from_token]
        pieces = list(takewhile(_is_in_dram, stored)) if dram_only else stored
        if not pieces:
            state.outbox.count("load_misses")
            reason = ON_SSD if stored else match.miss_reason
            return LoadAnswer(Lookup.MISS, miss_reason=reason)
        lease_id = state.leases.next_id()
        lease = LoadLease(lease_id, owner, key, from_token, [], more=False, since_ns=state.now_ns)
        return self._grant(lease, pieces, len(stored))

    def prepare_export(self, export: Export, max_spans: int, owner: int) -> LoadAnswer:
        """See SessionFiles.prepare_export."""
        state = self._state
        pieces = exporting.next_pieces(state, export, max_spans)
        lease = LoadLease(
            state.leases.next_id(),
            owner,
            export.key,
            export.num_tokens,
            [],
            more=False,
            since_ns=state.now_ns,
            is_export=True,
        )
        return self._grant(lease, pieces, len(pieces))

    def _grant(self, lease: LoadLease, pieces: list[Piece], num_stored: int) -> LoadAnswer:
        """Lease pieces, as far as slots can be had for them."""
        state = self._state
        self._lease_pieces(lease, pieces)
        if not lease.entries:
            state.outbox.count("loads_busy")
            state.outbox.want_wake()
            return LoadAnswer(Lookup.MISS, miss_reason=BUSY)
        lease.more = len(lease.entries) < num_stored
        state.leases.add(lease)
        if not lease.num_waiting:
            return self._hit(lease)
        self._track(lease)
        return self._granted(lease, Lookup.PENDING)

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
            first = next(i for i, (block, _) in enumerate(lease.entries) if block.io.is_arriving)
            self._cut(lease, first, DEADLINE)
        if lease.entries:
            return self._hit(lease)
        failure = lease.failure
        move(lease, "settle")
        self.release(lease)
        if not lease.is_export:
            self._state.outbox.count("load_misses")
        return LoadAnswer(Lookup.MISS, miss_reason=failure)

    def complete(self, lease_id: int, owner: int) -> SessionKey:
        """See CacheEngine.complete_load; returns whose lease it was."""
        lease = self._state.leases.load_of(lease_id, owner)
        if lease.is_export:
            self.release(lease)
            return lease.key
        has_arrived = lease.entries and not lease.num_waiting and not lease.failure
        if lease.phase is LeasePhase.HELD:  # followed by its progress word, or given up
            self._count(lease) if has_arrived else self._state.outbox.count("load_misses")
        if has_arrived and not lease.more:
            self._state.placement.loaded(lease.key)
        self.release(lease)
        session = self._state.sessions.get(lease.key)
        if session is not None:
            self._state.touch(session)
            self._state.outbox.index.session_used(session.key)
        return lease.key

    def release(self, lease: LoadLease) -> None:
        """End a lease; reads under way go on and serve the cache."""
        if lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))
        if lease.is_tracked:
            self._state.outbox.add(UntrackLoad(lease.lease_id))
        self._state.leases.end(lease)
        self._cut(lease, 0, "")

    def revoke(self, block: Block) -> None:
        """End the leases that read a block whose bytes are wrong: their completion must fail."""
        for lease in self._state.leases.reading(block) if block.readers else ():
            self.release(lease)

    # --------------------------------------------------------------------------------- completions

    def read_done(self, op_id: int, outcome: IoOutcome, stored: StoredBlock | None) -> None:
        """See CacheEngine.read_done."""
        state = self._state
        arrival = self._reader.ended(op_id, outcome)
        block = arrival.block
        if outcome is IoOutcome.OK and stored is not None:
            kind = MoveKind.READ_AHEAD if block.is_ahead else MoveKind.READ
            state.note_block(block, kind)
            assert block.slot_id is not None, "a block keeps its slot while it is read"
            state.slots.commit(block.slot_id)
            state.blocks.know(block, stored.token_ids, stored.checksums)
            state.journal.put_block(block)
            self._arrived(arrival)
            return
        state.leave_dram(block)
        is_corrupt = outcome is IoOutcome.CORRUPT
        self._cut_waiting(arrival, CORRUPT if is_corrupt else READ_ERROR)
        if is_corrupt:
            report_corrupt(state, block, Tier.SSD)
            state.lose(block, CORRUPT)
        else:
            state.outbox.count("read_errors")
            state.outbox.emit(READ_FAILED, block.last_user, {"block": block.key.hex()})
            state.settle(block)

    def verify_done(self, op_id: int, outcome: IoOutcome) -> None:
        """See CacheEngine.verify_done."""
        state = self._state
        arrival = state.under_way.end_verify(op_id)
        self._verifier.ended(op_id)
        block = arrival.block
        if outcome is IoOutcome.OK:
            self._verifier.passed(block)
            self._arrived(arrival)
        elif outcome is IoOutcome.CORRUPT:
            report_corrupt(state, block, Tier.DRAM)
            for lease in arrival.early.values():
                if state.leases.get(lease.lease_id) is lease:
                    self.release(lease)
            self._fall_back(arrival)
        else:
            self._verifier.failed(block)
            self._cut_waiting(arrival, READ_ERROR)
            state.settle(block)
        self._writer.admit(block, was_queued=arrival.was_queued)
        self._verifier.issue()
        self._writer.issue()

    def _arrived(self, arrival: Arrival) -> None:
        """The block's bytes may be used."""
        for lease in arrival.waiting.values():
            self._waits_less(lease)
        self._state.outbox.space_freed()
        self._state.settle(arrival.block)

    def _fall_back(self, arrival: Arrival) -> None:
        """Read a block from SSD whose copy in DRAM is corrupt; without one it is lost."""
        state, block = self._state, arrival.block
        if block.extent is None:
            self._cut_waiting(arrival, CORRUPT)
            state.lose(block, CORRUPT)
        elif not arrival.waiting:
            state.leave_dram(block)
            state.settle(block)
        else:
            assert block.slot_id is not None, "a block keeps its slot while it is verified"
            state.clear_slot(block.slot_id)
            state.slots.rewrite(block.slot_id)
            state.blocks.doubt(block, is_unverified=False)
            state.blocks.know(block, b"", b"")
            read = self._reader.begin(block)
            read.waiting = arrival.waiting
            self._reader.issue([read])
            for lease in read.waiting.values():
                self._track(lease)

    def _cut_waiting(self, arrival: Arrival, failure: str) -> None:
        """Cut the leases that wait for a block that does not come."""
        for lease in arrival.waiting.values():
            first = next(i for i, (block, _) in enumerate(lease.entries) if block is arrival.block)
            self._cut(lease, first, failure)
            self._waits_less(lease)

    def _waits_less(self, lease: LoadLease) -> None:
        lease.num_waiting -= 1
        if not lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))

    # -------------------------------------------------------------------------------------- inside

    def _lease_pieces(self, lease: LoadLease, pieces: list[Piece]) -> None:
        """Lease as many blocks as slots can be had for, in token order.

        What is leased already is never evicted. If room must be made, all matched blocks are held
        meanwhile: making room for one must not drop another.
        """
        is_holding = any(piece.block.slot_id is None for piece in pieces)
        for piece in pieces if is_holding else ():
            piece.block.holders += 1
        reads: list[Arrival] = []
        for index, piece in enumerate(pieces):
            block = piece.block
            is_here = _is_in_dram(piece)
            if block.slot_id is None:
                if not self._has_slot(pieces[index:]):
                    break
                reads.append(self._reader.start(block))
            elif self._verifier.is_needed(block, always=lease.is_export):
                self._verifier.start(block, urgent=True)
            if block.io.is_arriving:
                self._wait_for(lease, block)
            block.readers += 1
            if block.is_ahead:
                block.is_ahead = False
                self._state.outbox.count("prefetch_hits")
            tier = Tier.DRAM if is_here else Tier.SSD
            lease.entries.append((block, _load_span(piece, lease.from_token, tier)))
        self._reader.issue(reads)
        for piece in pieces if is_holding else ():
            piece.block.holders -= 1
            self._state.settle(piece.block)

    def _has_slot(self, pieces: list[Piece]) -> bool:
        if self._state.slots.num_free:
            return True
        num_wanted = sum(piece.block.slot_id is None for piece in pieces)
        return self._writer.make_slots(num_wanted) > 0

    def _wait_for(self, lease: LoadLease, block: Block) -> None:
        arrival = self._state.under_way.arrival_of[block.key]
        self._reader.join(arrival)
        waiting = arrival.waiting
        lease.num_waiting += lease.lease_id not in waiting
        waiting[lease.lease_id] = lease

    def _track(self, lease: LoadLease) -> None:
        """Have the lease's progress published; again, if an operation took another's place."""
        blocks = {id(block): block for block, _ in lease.entries if block.io.is_arriving}
        op_ids = tuple(
            self._state.under_way.arrival_of[block.key].op_id for block in blocks.values()
        )
        lease.is_tracked = True
        self._state.outbox.add(TrackLoad(lease.lease_id, lease.owner, op_ids))

    def _cut(self, lease: LoadLease, num_entries: int, failure: str) -> None:
        """Keep the lease's first entries and let go of the others."""
        kept, released = lease.entries[:num_entries], lease.entries[num_entries:]
        lease.entries, lease.more, lease.failure = kept, False, failure
        still_needed = {block.key for block, _ in kept}
        for block, _ in released:
            block.readers -= 1
            if block.io.is_arriving and block.key not in still_needed:
                waiting = self._state.under_way.arrival_of[block.key].waiting
                lease.num_waiting -= waiting.pop(lease.lease_id, None) is not None
        for block, _ in reversed(released):
            self._state.settle(block)
        self._state.outbox.space_freed()

    def _granted(self, lease: LoadLease, lookup: Lookup) -> LoadAnswer:
        spans = tuple(span for _, span in lease.entries)
        end_token = spans[-1].token_offset + spans[-1].num_tokens
        return LoadAnswer(lookup, lease.lease_id, spans, end_token, lease.more)

    def _hit(self, lease: LoadLease) -> LoadAnswer:
        move(lease, "settle")
        self._count(lease)
        return self._granted(lease, Lookup.HIT)

    def _count(self, lease: LoadLease) -> None:
        if lease.is_export:
            return
        self._state.outbox.count("load_hits")
        num_tokens = dict.fromkeys(Tier, 0)
        for _, span in lease.entries:
            num_tokens[span.tier] += span.num_tokens
        for tier, num_of_tier in num_tokens.items():
            self._state.outbox.count(f"load_tokens_{tier.value}", num_of_tier)
            self._state.turns.loaded(lease.key, tier, num_of_tier)
            if num_of_tier:
                why = tier.value
                self._state.note(lease.key, MoveKind.LOADED, num_tokens=num_of_tier, why=why)


def _is_in_dram(piece: Piece) -> bool:
    """Whether the bytes are in a slot, be it unverified; what is still being read is not."""
    return piece.block.slot_id is not None and piece.block.io is not BlockIo.READING


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
