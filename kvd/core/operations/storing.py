"""Stores: lease slots that an engine fills with new KV, then publish them as a session's blocks.

Pure. Invariants: 1. a store lease's slots are WRITING, in no block and so invisible to others, and
the journal records them as such; 2. the existing blocks that a store lease builds on count it in
`holders`; 3. a committed slot never changes: a partial block grows by being replaced with a new
block that contains its tokens, too (D9); 4. a store that was prepared before a discard and is
completed after it publishes nothing.
"""

from collections.abc import Callable, Sequence

from kvd.core.io.placement import Placement
from kvd.core.io.writing import Writer
from kvd.core.operations.chaining import Chaining
from kvd.core.operations.filling import (
    GrantedParts,
    check_positions,
    commit_parts,
    commit_slot,
    free_part,
    grant_parts,
    new_parts,
)
from kvd.core.operations.matching import (
    NewParts,
    Piece,
    StorePlan,
    check_from_token,
    kept_pieces,
    match_tokens,
    num_tokens_of,
    plan_blocks,
)
from kvd.core.operations.publishing import Publisher
from kvd.core.operations.state_matching import StateChain, pieces_at
from kvd.core.records.records import StoreAnswer
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import NewBlock, Part, RestoredLease, StoreLease, lost
from kvd.core.state.session_history import MoveKind
from shared.types.granted_slots import StoreBlock
from shared.types.lineage import Lineage
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

GAP = "gap"
WAIT = "wait"
NO_SPACE = "no_space"
QUOTA = "quota"
MEAN_SHARE = 1 / 16  # weight of the newest store in the running mean of store sizes


class Storer:
    """Prepares and completes stores of one cache state.

    Args:
        state: the cache's tables.
        placement: makes room within quotas, and for another session.
        writer: makes room in DRAM.
        publisher: makes stored blocks a session's.
        consider_compaction: called with the session of each completed store.
    """

    def __init__(
        self,
        state: CacheState,
        placement: Placement,
        writer: Writer,
        publisher: Publisher,
        consider_compaction: Callable[[SessionKey], None],
    ) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._publisher = publisher
        self._consider_compaction = consider_compaction

    def prepare(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        engine_id: int,
        *,
        lineage: Lineage | None = None,
        load_ends: Sequence[int] = (),
    ) -> StoreAnswer:
        """Lease slots for the KV of token_ids[from_token:] that is not stored yet, as far as fits.

        If all of it is stored already the session adopts it at once, and there is no lease.
        Otherwise the caller owes `complete`.

        Args:
            key: the session.
            token_ids: all tokens of its context, from the first one on.
            from_token: position from which the engine has KV.
            engine_id: the engine that stores.
            lineage: lineage of the tokens: KV of another one does not match. None: not named; then
                the discards are taken from the stored session.
            load_ends: token counts at which later loads are to be able to end. The states there, or
                the windows that such loads need, are leased, too, if they are not stored and as far
                as there is room.

        Raises:
            InvalidRequestError: malformed token ids, or a position outside them.
            TooManyLeasesError: the bound on leases is reached.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        state.turns.on_store(key, num_tokens_of(token_ids), state.now_ns)
        return self.lease_slots(key, token_ids, from_token, engine_id, lineage, load_ends)

    def lease_slots(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        engine_id: int,
        lineage: Lineage | None,
        load_ends: Sequence[int] = (),
    ) -> StoreAnswer:
        """Do the work of `prepare` without the checks and records of an engine's turn."""
        num_tokens = num_tokens_of(token_ids)
        check_from_token(from_token, num_tokens)
        state = self._state
        session = state.sessions.get(key)
        if session is not None:
            state.touch(session)
        chaining = Chaining(state.layout, state.salt_of(key.tenant), lineage)
        check_positions(state, load_ends, num_tokens)
        base = self._find_base(key, token_ids, from_token, chaining)
        stored_end = base[-1].end if base else 0
        if from_token > stored_end:
            return self._refuse(GAP, stored_end)
        lease_id, now_ns = state.leases.next_id(), state.now_ns
        lease = StoreLease(lease_id, engine_id, key, lineage=lineage, since_ns=now_ns)
        lease.num_discards = session.num_discards if session else 0
        lease.load_ends = [at for at in load_ends if at != num_tokens]
        if state.layout.state_bytes:
            lease.token_ids = token_ids
        held: list[Part] = [(piece.span, piece.block) for piece in base]
        plan = StorePlan(from_token, base, plan_blocks(state, chaining, token_ids, base))
        held += [(new.span, new.block) for new in plan.planned if new.block is not None]
        self._hold(held)
        num_new = plan.num_new
        wanted = new_parts(state, key, token_ids, chaining, plan, load_ends)
        num_parts = len(wanted) * state.layout.part_slots
        if wanted and not self._placement.make_quota(key.tenant, num_new + num_parts):
            wanted, num_parts = [], 0
        if not num_new and not (wanted and self._make_room_for_parts(num_parts)):
            self._publisher.publish(lease, held)
            self._release(held)
            return StoreAnswer(end_token=num_tokens)
        if not self._placement.make_quota(key.tenant, num_new):
            self._release(held)
            return self._refuse(QUOTA, stored_end)
        self._writer.make_slots(num_new + num_parts)
        lease.parts = held[: len(base)]
        answer = self._grant(lease, plan, wanted)
        if answer is None:
            self._release(held)
            return self._refuse(self._refusal_reason(), stored_end)
        num_kept = sum(isinstance(part, Block) for _, part in lease.parts)
        self._release(held[num_kept:])  # beyond what slots could be had for
        return answer

    def _find_base(
        self, key: SessionKey, token_ids: bytes, from_token: int, chaining: Chaining
    ) -> list[Piece]:
        """Return the stored KV that a store builds on.

        With states, an engine may have loaded more than this session has: a state led it to the
        blocks of another session. Then the store builds on those.
        """
        state, num_tokens = self._state, num_tokens_of(token_ids)
        match = match_tokens(state, key, token_ids, chaining)
        base = kept_pieces(state, match.pieces, from_token, num_tokens, chaining)
        if not state.layout.state_bytes or from_token <= match.end:
            return base
        for stored in StateChain(chaining, state.layout.block_tokens, token_ids).stored(state):
            if stored.position >= from_token:
                pieces = pieces_at(state, key, token_ids, chaining, match, stored)
                return kept_pieces(state, pieces, from_token, num_tokens, chaining)
        return base

    def complete(self, lease_id: int, engine_id: int, *, success: bool) -> int:
        """Publish the filled slots of a store lease, or free them, and end the lease.

        Published blocks are hashed and written to SSD later.

        Returns:
            Stored tokens of the session.

        Raises:
            LeaseLostError: the engine does not hold it (any more).
        """
        state = self._state
        state.outbox.count("leases_lost", state.leases.is_lost(lease_id, engine_id))
        lease = state.leases.store_of(lease_id, engine_id)
        if isinstance(lease, RestoredLease):
            self.release(lease)
            raise lost(lease_id)
        if success:
            self._commit(lease)
            held = [part for part in lease.parts if isinstance(part[1], Block)]
            if not self._is_outdated(lease):
                self._publisher.publish(lease, held)
            if state.placement.queue.is_running(lease.key):
                state.placement.on_load(lease.key)
        self.release(lease)
        session = state.sessions.get(lease.key)
        state.histograms.store_s.observe((state.now_ns - lease.since_ns) / NS_PER_S)
        self._consider_compaction(lease.key)
        return session.num_tokens if session else 0

    def release(self, lease: StoreLease | RestoredLease) -> None:
        """End a lease and free its slots that are not committed."""
        self._state.leases.end(lease)
        if isinstance(lease, StoreLease):
            parts = lease.all_parts()
            for _, part in parts:
                if isinstance(part, NewBlock):
                    free_part(self._state, lease.key.tenant, part)
            self._release(parts)
        else:
            for slot_id, _ in lease.slots():
                self._state.free_slot(slot_id)
        # Only here: a refused call frees nothing, and must not wake the callers that wait for
        # space, or they would wake each other for ever.
        self._state.outbox.on_space_freed()

    def outdate(self, lease: StoreLease) -> None:
        """Make a store publish nothing, and hold only the slots that its engine fills."""
        held = [part for part in lease.parts if isinstance(part[1], Block)]
        lease.parts = [part for part in lease.parts if isinstance(part[1], NewBlock)]
        lease.is_outdated = True
        self._release(held)

    def reattach(self, lease: StoreLease | RestoredLease, engine_id: int) -> None:
        """Give a lease back to its engine, which has attached again as `engine_id`."""
        self._state.leases.reattach(lease, engine_id)
        self._journal(lease)

    # ------------------------------------------------------------------------------------- prepare

    def _grant(
        self, lease: StoreLease, plan: StorePlan, wanted: Sequence[NewParts]
    ) -> StoreAnswer | None:
        """Lease as many planned blocks, and then parts, as there are slots; None if there are none.

        A store that gets none of its new blocks gets no states or windows either.
        """
        slots = self._state.slots
        blocks = []
        end_token = sum(span.num_tokens for span, _ in lease.parts) if wanted else 0
        is_cut = False
        for new in plan.planned:
            part: Block | NewBlock
            if new.block is None:
                if not slots.num_free:
                    is_cut = True
                    break
                slot_id, generation = slots.allocate()
                part = NewBlock(slot_id, generation, new.token_ids, new.parent)
                blocks.append(
                    StoreBlock(slot_id, new.token_offset, new.span.num_tokens, generation)
                )
            else:
                part = new.block
            lease.parts.append((new.span, part))
            end_token = new.token_offset + new.span.num_tokens
        state = self._state
        granted = GrantedParts()
        if wanted and (blocks or not is_cut):
            granted = grant_parts(state, lease, wanted, end_token)
        if not blocks and not lease.side_parts:
            return None
        num_slots = len(blocks) + len(lease.side_parts)
        state.leases.add(lease)
        state.tenants.charge(lease.key.tenant, num_slots)
        state.mean_store_blocks += MEAN_SHARE * (num_slots - state.mean_store_blocks)
        self._journal(lease)
        return StoreAnswer(
            lease.lease_id,
            tuple(blocks),
            end_token,
            is_cut,
            states=granted.states,
            windows=granted.windows,
        )

    def _journal(self, lease: StoreLease | RestoredLease) -> None:
        self._state.journal.put_writing(lease.slots(), lease.lease_id, lease.engine_id)

    def _make_room_for_parts(self, num_parts: int) -> bool:
        """Make room for parts and return whether it suffices for one state or window."""
        return self._writer.make_slots(num_parts) >= self._state.layout.part_slots

    def _refusal_reason(self) -> str:
        """Return WAIT if slots will become free: leases or reads end, writes make blocks clean."""
        state = self._state
        return (
            WAIT if len(state.leases) or state.under_way.reads or state.is_cleaning() else NO_SPACE
        )

    def _refuse(self, why: str, stored_end: int) -> StoreAnswer:
        """Count a refusal and return its answer; after WAIT, freed space wakes the caller."""
        outbox = self._state.outbox
        if why == WAIT:
            outbox.request_wake()
            outbox.count("stores_waited")
        else:
            outbox.count("stores_refused")
        return StoreAnswer(end_token=stored_end, refused=why)

    # ------------------------------------------------------------------------------------ complete

    def _commit(self, lease: StoreLease) -> None:
        """Turn filled slots into blocks of the index, up to the first existing block that is gone.

        The lease holds the blocks.
        """
        state = self._state
        num_blocks = num_tokens = 0
        for index, (span, part) in enumerate(lease.parts):
            if isinstance(part, Block):
                if not state.blocks.holds(part):  # found corrupt meanwhile
                    self._shorten(lease, index)
                    break
                continue
            block = state.find_block(span.block_key)
            if block is None:
                block = commit_slot(state, lease.key.tenant, span, part)
                num_blocks += 1
                num_tokens += span.num_tokens
            else:  # another session has committed the same block meanwhile
                free_part(state, lease.key.tenant, part)
            block.holders += 1
            lease.parts[index] = (span, block)
        if lease.side_parts:
            commit_parts(state, lease)
        if num_blocks:
            state.outbox.count("store_tokens", num_tokens)
            state.record_move(
                lease.key, MoveKind.STORED, num_blocks=num_blocks, num_tokens=num_tokens
            )

    def _shorten(self, lease: StoreLease, index: int) -> None:
        """Release all parts of a lease from an index on."""
        released = lease.parts[index:]
        del lease.parts[index:]
        for _, part in released:
            if isinstance(part, NewBlock):
                free_part(self._state, lease.key.tenant, part)
        self._release(released)

    def _is_outdated(self, lease: StoreLease) -> bool:
        """Whether a discard has come since the store was prepared: its tokens are no longer so."""
        session = self._state.sessions.get(lease.key)
        is_discarded = session is not None and session.num_discards != lease.num_discards
        return is_discarded or lease.is_outdated

    # -------------------------------------------------------------------------------------- leases

    def _hold(self, parts: Sequence[Part]) -> None:
        for _, part in parts:
            if isinstance(part, Block):
                part.holders += 1

    def _release(self, parts: Sequence[Part]) -> None:
        for _, part in parts:
            if isinstance(part, Block):
                part.holders -= 1
                self._state.settle(part)
