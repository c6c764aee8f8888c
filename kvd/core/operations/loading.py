"""Loads: find the stored KV of a token sequence and lease its slots to an engine.

A block that is only on SSD is read, an unverified one is verified first: the load is then PENDING.

Pure. Invariants: 1. each entry of a load lease counts once in its block's `readers`; 2. a lease's
`num_waiting` is the number of its blocks that are READING or VERIFYING, and the lease is in
exactly these arrivals' `waiting`; 3. a load creates no session; 4. a lease that was PENDING is
tracked by a progress word until it ends.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from kvd.core.io.reading import Reader
from kvd.core.io.verifying import Verifier
from kvd.core.io.writing import Writer
from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import (
    DISCARDED,
    UNKNOWN_SESSION,
    Match,
    Piece,
    check_from_token,
    find_miss_reason,
    match_tokens,
    num_tokens_of,
    token_spans,
)
from kvd.core.operations.state_matching import NO_STATE, up_to_state
from kvd.core.operations.window_matching import NO_WINDOW, Loadable, up_to_windows
from kvd.core.records.actions import LeaseReady, TrackLoad, UntrackLoad
from kvd.core.records.records import LeaseState, LoadAnswer
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import LeasePhase, LoadLease, move
from kvd.core.state.session_history import MoveKind
from shared.types.granted_slots import GrantedState, GrantedWindow, LoadSpan, Lookup
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

if TYPE_CHECKING:
    from kvd.core.state.under_way import Arrival

BUSY = "busy"
READ_ERROR = "read_error"
DEADLINE = "deadline"
ON_SSD = "on_ssd"


class Loader:
    """Prepares, settles and completes loads of one cache state.

    Args:
        state: the cache's tables.
        reader: begins reads of blocks that are only on SSD.
        writer: makes room for them in DRAM.
        verifier: begins verifications of blocks that are not verified yet.
        consider_compaction: called with the session of each completed load.
    """

    def __init__(
        self,
        state: CacheState,
        reader: Reader,
        writer: Writer,
        verifier: Verifier,
        consider_compaction: Callable[[SessionKey], None],
    ) -> None:
        self._state = state
        self._reader = reader
        self._writer = writer
        self._verifier = verifier
        self._consider_compaction = consider_compaction

    def prepare(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        engine_id: int,
        *,
        dram_only: bool = False,
        lineage: Lineage | None = None,
    ) -> LoadAnswer:
        """Lease the stored KV of token_ids[from_token:], as far as there are slots for it.

        Unless the answer is a MISS the caller owes `complete`; if it is PENDING, first `settle`,
        after LeaseReady. With `dram_only` only what is in DRAM is leased, up to the first block
        that is not, and no read is begun (but a slot that verification finds corrupt is read again
        from SSD). KV of another lineage than the one named does not match. If none is named, the
        discards are taken from the stored session.

        Raises:
            InvalidRequestError: malformed token ids, or a position outside them.
            TooManyLeasesError: the bound on leases is reached.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        num_tokens = num_tokens_of(token_ids)
        is_running = state.placement.queue.is_running(key)
        state.turns.on_request(key, num_tokens, state.now_ns, is_running=is_running)
        check_from_token(from_token, num_tokens)
        session = state.sessions.get(key)
        if session is not None:
            state.touch(session)
        chaining = Chaining(state.layout, state.salt_of(key.tenant), lineage)
        match = match_tokens(state, key, token_ids, chaining)
        runs = () if session is None else token_spans(state, session)
        if session is not None and session.lineage is None and match.covers(session, runs):
            session.lineage = lineage
        found = self._loadable(key, token_ids, from_token, chaining, match, dram_only=dram_only)
        num_parts = sum(not piece.span.num_tokens for piece in found.pieces)
        end = found.pieces[-1].end if found.pieces else min(from_token, match.end)
        reason, missing = match.miss_reason, num_tokens - end
        if missing:
            reason = self._miss_reason(match, end, token_ids, chaining)
            if state.history.knows(key) or reason == DISCARDED:
                state.record_move(key, MoveKind.MISSED, num_tokens=missing, why=reason)
        stored = [piece for piece in found.pieces if piece.end > from_token]
        pieces = stored
        if dram_only:
            pieces = list(takewhile(lambda piece: piece.block.is_in_dram, stored))
        if num_parts and len(pieces) < len(stored):
            pieces = []  # the tokens cannot be used without their state or windows
        if pieces:
            lease = LoadLease(
                state.leases.next_id(), engine_id, key, from_token, since_ns=state.now_ns
            )
            lease.num_parts, lease.windows = num_parts, found.windows
            answer = self.grant(lease, pieces, len(stored))
            # An unknown session only shares what others have stored: it has missed nothing.
            has_missed = missing and reason != UNKNOWN_SESSION
            if has_missed and answer.lookup is not Lookup.MISS and not answer.more:
                answer = replace(answer, miss_reason=reason)
        else:
            answer = self._answer_miss(ON_SSD if stored else reason)
        state.histograms.on_load(key, state.now_ns)
        return answer

    def _loadable(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        chaining: Chaining,
        match: Match,
        *,
        dram_only: bool,
    ) -> Loadable:
        """Return the part of a match that a load may end with: up to a state or window, if any."""
        state, layout = self._state, self._state.layout
        if layout.window:
            return up_to_windows(state, match.pieces, from_token, dram_only=dram_only)
        if layout.state_bytes:
            found = up_to_state(
                state, key, token_ids, from_token, chaining, match, dram_only=dram_only
            )
            return Loadable(found, ())
        return Loadable(match.pieces, ())

    def _miss_reason(self, match: Match, end: int, token_ids: bytes, chaining: Chaining) -> str:
        """Return why the load ends at `end` and not later."""
        if match.end <= end:
            return find_miss_reason(self._state, match, token_ids, chaining)
        return NO_WINDOW if self._state.layout.window else NO_STATE

    def grant(self, lease: LoadLease, pieces: list[Piece], num_stored: int) -> LoadAnswer:
        """Lease the first pieces of `num_stored` in order, as far as there are slots for them."""
        state = self._state
        self._lease_pieces(lease, pieces)
        if lease.num_parts and len(lease.entries) < num_stored:
            # Lease some of the tokens, so that the engine makes progress, but not all: the last
            # ones come with the state or windows, in the next load from there.
            num_runs = num_stored - lease.num_parts
            lease.num_parts = 0
            self.cut(lease, min(len(lease.entries), num_runs - 1), "")
        if not lease.entries:
            state.outbox.count("loads_busy")
            state.outbox.request_wake()
            return LoadAnswer(Lookup.MISS, miss_reason=BUSY)
        lease.more = len(lease.entries) < num_stored
        state.leases.add(lease)
        if not lease.num_waiting:
            return self._answer_hit(lease)
        self.track(lease)
        return self._build_answer(lease, Lookup.PENDING)

    def state_of(self, lease_id: int) -> LeaseState:
        """Return whether a load lease may be settled, is pending or is lost."""
        lease = self._state.leases.get(lease_id)
        if not isinstance(lease, LoadLease):
            return LeaseState.LOST
        return LeaseState.PENDING if lease.num_waiting else LeaseState.READY

    def settle(self, lease_id: int) -> LoadAnswer:
        """Answer a PENDING load: HIT with the spans that arrived, up to the first that did not.

        Before LeaseReady (at a deadline) it ends the wait for reads under way. After a MISS the
        caller owes nothing.

        Raises:
            LeaseLostError: the lease has ended, because its engine is gone.
        """
        lease = self._state.leases.load_of(lease_id)
        if lease.num_waiting:
            first = next(i for i, (block, _) in enumerate(lease.entries) if block.io.is_arriving)
            self.cut(lease, first, DEADLINE)
        if lease.entries:
            return self._answer_hit(lease)
        failure = lease.failure
        move(lease, "settle")
        self.release(lease)
        if lease.is_export:
            return LoadAnswer(Lookup.MISS, miss_reason=failure)
        return self._answer_miss(failure)

    def complete(self, lease_id: int, engine_id: int) -> None:
        """End a load lease, settled or not.

        Raises:
            LeaseLostError: the engine does not hold it (any more): what it loaded is not valid.
        """
        state = self._state
        state.outbox.count("leases_lost", state.leases.is_lost(lease_id, engine_id))
        lease = state.leases.load_of(lease_id, engine_id)
        if lease.is_export:
            self.release(lease)
        else:
            self._end(lease)
        state.histograms.load_s.observe((state.now_ns - lease.since_ns) / NS_PER_S)
        self._consider_compaction(lease.key)

    def _end(self, lease: LoadLease) -> None:
        """Count a completed load and release its lease; the load is a use of its session."""
        state = self._state
        has_arrived = lease.entries and not lease.num_waiting and not lease.failure
        if lease.phase is LeasePhase.HELD:  # not settled: followed by progress word, or cancelled
            self._count_hit(lease) if has_arrived else state.outbox.count("load_misses")
        if has_arrived and not lease.more:
            state.placement.on_load(lease.key)
        self.release(lease)
        session = state.sessions.get(lease.key)
        if session is not None:
            state.touch(session)
            state.outbox.index.put_use(session.key, state.now_ns)

    def release(self, lease: LoadLease) -> None:
        """End a lease. Reads under way continue: their blocks stay in the cache."""
        if lease.num_waiting:
            self._state.outbox.add(LeaseReady(lease.lease_id))
        if lease.is_tracked:
            self._state.outbox.add(UntrackLoad(lease.lease_id))
        self._state.leases.end(lease)
        self.cut(lease, 0, "")

    def revoke(self, block: Block) -> None:
        """End the leases that read a corrupt block, so that their completion fails."""
        for lease in self._state.leases.reading(block) if block.readers else ():
            self.release(lease)

    # ------------------------------------------------------------------------------------- private

    def _lease_pieces(self, lease: LoadLease, pieces: list[Piece]) -> None:
        """Lease as many blocks as there are slots for, in token order.

        Leased blocks are never evicted. If room must be made, all matched blocks are held
        meanwhile, so that making room for one does not evict another.
        """
        is_holding = any(piece.block.slot_id is None for piece in pieces)
        for piece in pieces if is_holding else ():
            piece.block.holders += 1
        reads: list[Arrival] = []
        # Looked up once, and few calls below: there are thousands of pieces.
        dram, ssd, from_token = Tier.DRAM.value, Tier.SSD.value, lease.from_token
        verifies_all = lease.is_export or self._state.limits.verify_on_load
        for index, piece in enumerate(pieces):
            block = piece.block
            tier = dram if block.is_in_dram else ssd
            if block.slot_id is None:
                if not self._has_slot(pieces[index:]):
                    break
                reads.append(self._reader.start(block))
            elif self._verifier.is_needed(block, always=verifies_all):
                self._verifier.start(block, urgent=True)
            if block.io is not BlockIo.IDLE and block.io.is_arriving:
                self._wait_for(lease, block)
            block.readers += 1
            if block.is_ahead:
                block.is_ahead = False
                self._state.outbox.count("prefetch_hits")
            lease.entries.append((block, _load_span(piece, from_token, tier)))
        self._reader.issue(reads)
        for piece in pieces if is_holding else ():
            piece.block.holders -= 1
            self._state.settle(piece.block)

    def _has_slot(self, pieces: list[Piece]) -> bool:
        """Whether a slot is free; if not, make room for as many as these pieces need."""
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

    def track(self, lease: LoadLease) -> None:
        """Publish the lease's progress; call it again when one operation replaces another."""
        blocks = {id(block): block for block, _ in lease.entries if block.io.is_arriving}
        op_ids = tuple(
            self._state.under_way.arrival_of[block.key].op_id for block in blocks.values()
        )
        lease.is_tracked = True
        self._state.outbox.add(TrackLoad(lease.lease_id, lease.engine_id, op_ids))

    def cut(self, lease: LoadLease, num_entries: int, failure: str) -> None:
        """Keep the lease's first entries and release the others; all, if parts are missing."""
        if failure and self._state.stored_parts is not None:
            num_entries = lease.num_parts = 0
        kept, released = lease.entries[:num_entries], lease.entries[num_entries:]
        lease.entries, lease.more, lease.failure = kept, False, failure
        still_needed = {block.key for block, _ in kept}
        for block, _ in released:
            block.readers -= 1
            is_at_rest = block.io is BlockIo.IDLE  # as nearly always
            if not is_at_rest and block.io.is_arriving and block.key not in still_needed:
                waiting = self._state.under_way.arrival_of[block.key].waiting
                lease.num_waiting -= waiting.pop(lease.lease_id, None) is not None
        for block, _ in reversed(released):  # tail first: what stays stored is a prefix
            self._state.settle(block)
        self._state.outbox.on_space_freed()

    def _answer_miss(self, reason: str) -> LoadAnswer:
        self._state.outbox.count("load_misses")
        self._state.histograms.misses.add(reason)
        return LoadAnswer(Lookup.MISS, miss_reason=reason)

    def _build_answer(self, lease: LoadLease, lookup: Lookup) -> LoadAnswer:
        spans = tuple(span for _, span in lease.entries)
        end_token = spans[-1].token_offset + spans[-1].num_tokens
        answer = LoadAnswer(lookup, lease.lease_id, spans, end_token, lease.more)
        if not lease.num_parts:
            return answer
        spans, parts = spans[: -lease.num_parts], spans[-lease.num_parts :]
        slot_ids = tuple(part.slot_id for part in parts)
        generations = tuple(part.generation for part in parts)
        step = self._state.layout.window_slots
        if not step:
            state = GrantedState(end_token, slot_ids, generations)
            return replace(answer, spans=spans, state=state)
        windows = tuple(
            GrantedWindow(*rows, slot_ids[first : first + step], generations[first : first + step])
            for rows, first in zip(lease.windows, range(0, len(parts), step), strict=True)
        )
        return replace(answer, spans=spans, windows=windows)

    def _answer_hit(self, lease: LoadLease) -> LoadAnswer:
        move(lease, "settle")
        self._count_hit(lease)
        return self._build_answer(lease, Lookup.HIT)

    def _count_hit(self, lease: LoadLease) -> None:
        if lease.is_export:
            return
        self._state.outbox.count("load_hits")
        if self._state.layout.window:
            num_windows = len(lease.windows) if lease.num_parts else 0
            self._state.outbox.count("load_windows", num_windows)
        else:
            self._state.outbox.count("load_states", lease.num_parts > 0)
        for tier in Tier:
            name = tier.value
            tokens = sum([span.num_tokens for _, span in lease.entries if span.tier == name])
            self._state.outbox.count(f"load_tokens_{name}", tokens)
            self._state.turns.on_load(lease.key, tier, tokens)
            if tokens:
                self._state.record_move(lease.key, MoveKind.LOADED, num_tokens=tokens, why=name)


def _load_span(piece: Piece, from_token: int, tier: str) -> LoadSpan:
    """Return the span of the piece's tokens from `from_token` on; its block has a slot."""
    (_, start, num_tokens, _, _), block, offset = piece
    assert block.slot_id is not None, "spans are granted on blocks with a slot"
    if offset < from_token:
        skipped = from_token - offset
        start, num_tokens, offset = start + skipped, num_tokens - skipped, from_token
    return LoadSpan(block.slot_id, start, num_tokens, offset, block.generation, tier)
