"""Stores: from tokens to slots that an engine fills, and from filled slots to a longer session.

Pure. Invariants: 1. a store lease's slots are WRITING and in no block: nobody else sees them, and
the journal says so; 2. the existing blocks a store lease builds on count it in `holders`; 3. a
committed slot never changes: growing a partial block replaces it by a new one that contains its
tokens (D9); 4. what was prepared before a discard and is completed after it publishes nothing.
"""

from collections.abc import Callable, Sequence

from kvd.core.io.placement import Placement
from kvd.core.io.writing import Writer
from kvd.core.operations.chaining import Chaining
from kvd.core.operations.filling import (
    GrantedParts,
    check_positions,
    commit_parts,
    committed,
    free,
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
from kvd.core.records.entries import WritingSlot
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
MEAN_SHARE = 1 / 16  # of the newest store in the running mean


class Storer:
    """Prepares and completes stores of one cache state.

    Args:
        state: the cache's tables.
        placement: makes room within quotas, and for another session.
        writer: makes room in DRAM.
        publisher: makes what is stored a session's.
        consider_compaction: called with each session after a store.
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
        """Lease slots for the KV of token_ids[from_token:] that is not stored, as far as possible.

        When all of it is stored already the session adopts it at once, and there is no lease. The
        lineage is that of the tokens: nothing else is matched. None: it is not named; then their
        discards are taken from what is stored. Of the states behind so many of the tokens those are
        leased, too, that are not stored, as far as there is room; or the windows that a load needs
        that is to end there.

        Raises:
            InvalidRequestError: token ids or position that cannot be.
            TooManyLeasesError: at the bound.
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
        """Do what `prepare` says, but for what is asked of an engine's turn."""
        num_tokens = num_tokens_of(token_ids)
        check_from_token(from_token, num_tokens)
        state = self._state
        session = state.sessions.get(key)
        if session is not None:
            state.touch(session)
        chaining = Chaining(state.layout, state.salt_of(key.tenant), lineage)
        check_positions(state, load_ends, num_tokens)
        base = self._base(key, token_ids, from_token, chaining)
        stored_end = base[-1].end if base else 0
        if from_token > stored_end:
            return self._refused(GAP, stored_end)
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
        if not num_new and not (wanted and self._may_have_parts(num_parts)):
            self._publisher.publish(lease, held)
            self._release(held)
            return StoreAnswer(end_token=num_tokens)
        if not self._placement.make_quota(key.tenant, num_new):
            self._release(held)
            return self._refused(QUOTA, stored_end)
        self._writer.make_slots(num_new + num_parts)
        lease.parts = held[: len(base)]
        answer = self._grant(lease, plan, wanted)
        if answer is None:
            self._release(held)
            return self._refused(self._why_no_slot(), stored_end)
        num_kept = sum(isinstance(part, Block) for _, part in lease.parts)
        self._release(held[num_kept:])  # beyond what slots could be had for
        return answer

    def _base(
        self, key: SessionKey, token_ids: bytes, from_token: int, chaining: Chaining
    ) -> list[Piece]:
        """Find the stored KV that a store builds on.

        Where that is less than the engine has loaded, because a state has led it to the blocks of
        another session, it is what this one has.
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
        """Publish what a store lease's slots hold (or forget it), and have it written to SSD.

        Returns:
            Stored tokens of the session.

        Raises:
            LeaseLostError: if it is not the engine's (any more).
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
        """End a lease; slots that are not committed are free again."""
        self._state.leases.end(lease)
        if isinstance(lease, StoreLease):
            parts = lease.all_parts()
            for _, part in parts:
                if isinstance(part, NewBlock):
                    free(self._state, lease.key.tenant, part)
            self._release(parts)
        else:
            for slot_id, _ in lease.slots():
                self._state.free_slot(slot_id)
        self._state.outbox.on_space_freed()  # here only: a refused call frees nothing, and must not
        # wake the others that wait, or they would wake each other for ever

    def outdate(self, lease: StoreLease) -> None:
        """Let a store publish nothing, and hold nothing but the slots that its engine fills."""
        held = [part for part in lease.parts if isinstance(part[1], Block)]
        lease.parts = [part for part in lease.parts if isinstance(part[1], NewBlock)]
        lease.is_outdated = True
        self._release(held)

    def reattach(self, lease: StoreLease | RestoredLease, engine_id: int) -> None:
        """Have an engine that came back hold its lease again."""
        self._state.leases.reattach(lease, engine_id)
        self._journal(lease)

    # ------------------------------------------------------------------------------------- prepare

    def _grant(
        self, lease: StoreLease, plan: StorePlan, wanted: Sequence[NewParts]
    ) -> StoreAnswer | None:
        """Lease as many planned blocks, and then parts, as there are slots; None: it is nothing.

        A store that is not granted any of its new blocks has no states or windows either.
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
                part = NewBlock(slot_id, generation, new.token_ids)
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
        for slot_id, generation in lease.slots():
            record = WritingSlot(generation, lease.lease_id, lease.engine_id)
            self._state.journal.put(slot_id, record)

    def _may_have_parts(self, num_parts: int) -> bool:
        """Make room for parts; returns whether there is enough for one state or window."""
        return self._writer.make_slots(num_parts) >= self._state.layout.part_slots

    def _why_no_slot(self) -> str:
        """Whether waiting may help: leases end, reads end, writes make blocks clean."""
        state = self._state
        return (
            WAIT if len(state.leases) or state.under_way.reads or state.is_cleaning() else NO_SPACE
        )

    def _refused(self, why: str, stored_end: int) -> StoreAnswer:
        outbox = self._state.outbox
        if why == WAIT:
            outbox.request_wake()
            outbox.count("stores_waited")
        else:
            outbox.count("stores_refused")
        return StoreAnswer(end_token=stored_end, refused=why)

    # ------------------------------------------------------------------------------------ complete

    def _commit(self, lease: StoreLease) -> None:
        """Turn the lease's new blocks into blocks, as far as what they build on is still there."""
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
                block = committed(state, lease.key.tenant, span, part)
                num_blocks += 1
                num_tokens += span.num_tokens
            else:  # another session has committed the same meanwhile
                free(state, lease.key.tenant, part)
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
        """Shorten a lease to its first parts."""
        released = lease.parts[index:]
        del lease.parts[index:]
        for _, part in released:
            if isinstance(part, NewBlock):
                free(self._state, lease.key.tenant, part)
        self._release(released)

    def _is_outdated(self, lease: StoreLease) -> bool:
        """Whether a discard has come since it was prepared: it is of another sequence."""
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
