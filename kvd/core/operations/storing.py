"""Stores: from tokens to slots that an engine fills, and from filled slots to a longer session.

Pure. Invariants: 1. a store lease's slots are WRITING and in no block: nobody else sees them, and
the journal says so; 2. the existing blocks a store lease builds on count it in `holders`; 3. a
committed slot never changes: growing a partial block replaces it by a new one that contains its
tokens (D9); 4. what was prepared before a discard and is completed after it publishes nothing.
"""

from collections.abc import Callable, Sequence

from kvd.core.io.placement import Placement
from kvd.core.io.verifying import Hasher
from kvd.core.io.writing import Writer
from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import (
    PlannedBlock,
    check_from_token,
    kept_pieces,
    match_tokens,
    num_tokens_of,
    plan_blocks,
)
from kvd.core.records.actions import SESSION_STORED
from kvd.core.records.entries import Span, WritingSlot
from kvd.core.records.records import StoreAnswer
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.leases import NewBlock, Part, RestoredLease, StoreLease, lost
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.granted_slots import StoreBlock
from shared.types.lineage import WHOLE, Lineage
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
        hasher: has new blocks hashed, and then written.
        consider_compaction: called with each session after a store.
    """

    def __init__(
        self,
        state: CacheState,
        placement: Placement,
        writer: Writer,
        hasher: Hasher,
        consider_compaction: Callable[[SessionKey], None],
    ) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._hasher = hasher
        self._consider_compaction = consider_compaction

    def prepare(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        engine_id: int,
        *,
        lineage: Lineage | None = None,
    ) -> StoreAnswer:
        """Lease slots for the KV of token_ids[from_token:] that is not stored, as far as possible.

        When all of it is stored already the session adopts it at once, and there is no lease. The
        lineage is that of the tokens: nothing else is matched. None: it is not named; then their
        discards are taken from what is stored.

        Raises:
            InvalidRequestError: token ids or position that cannot be.
            TooManyLeasesError: at the bound.
            ErasingError: the tenant is being erased.
        """
        state = self._state
        state.tenants.refuse_erased(key.tenant)
        state.turns.stored(key, num_tokens_of(token_ids), state.now_ns)
        return self.lease_slots(key, token_ids, from_token, engine_id, lineage)

    def lease_slots(
        self,
        key: SessionKey,
        token_ids: bytes,
        from_token: int,
        engine_id: int,
        lineage: Lineage | None,
    ) -> StoreAnswer:
        """Do what `prepare` says, but for what is asked of an engine's turn."""
        num_tokens = num_tokens_of(token_ids)
        check_from_token(from_token, num_tokens)
        state = self._state
        session = state.sessions.get(key)
        if session is not None:
            state.touch(session)
        chaining = Chaining(state.layout, state.salt_of(key.tenant), lineage)
        match = match_tokens(state, key, token_ids, chaining)
        base = kept_pieces(match.pieces, from_token, num_tokens, chaining)
        stored_end = base[-1].end if base else 0
        if from_token > stored_end:
            return self._refused(GAP, stored_end)
        lease_id, now_ns = state.leases.next_id(), state.now_ns
        lease = StoreLease(lease_id, engine_id, key, lineage=lineage, since_ns=now_ns)
        lease.num_discards = session.num_discards if session else 0
        held: list[Part] = [(piece.span, piece.block) for piece in base]
        planned = plan_blocks(state, chaining, token_ids, base)
        held += [(new.span, new.block) for new in planned if new.block is not None]
        self._hold(held)
        num_new = sum(new.block is None for new in planned)
        if not num_new:
            self._publish(key, held, lineage)
            self._release(held)
            return StoreAnswer(end_token=num_tokens)
        if not self._placement.make_quota(key.tenant, num_new):
            self._release(held)
            return self._refused(QUOTA, stored_end)
        self._writer.make_slots(num_new)
        lease.parts = held[: len(base)]
        answer = self._grant(lease, planned)
        if answer is None:
            self._release(held)
            return self._refused(self._why_no_slot(), stored_end)
        num_kept = sum(isinstance(part, Block) for _, part in lease.parts)
        self._release(held[num_kept:])  # beyond what slots could be had for
        return answer

    def adopt(self, key: SessionKey, token_ids: bytes) -> Session | None:
        """Make a session of whole blocks that are stored: of all these tokens, or of none.

        It is a use of the session, and no turn.

        Returns:
            The session; None if some of the tokens are not stored, or there is no room for it.
        """
        state = self._state
        chaining = Chaining(state.layout, state.salt_of(key.tenant), WHOLE)
        match = match_tokens(state, key, token_ids, chaining)
        if match.end < num_tokens_of(token_ids):
            return None
        held: list[Part] = [(piece.span, piece.block) for piece in match.pieces]
        self._hold(held)
        session = self._give(key, [piece.span for piece in match.pieces], WHOLE)
        self._release(held)
        return session

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
                self._publish(lease.key, held, lease.lineage)
            if state.placement.queue.is_running(lease.key):
                state.placement.loaded(lease.key)
        self.release(lease)
        session = state.sessions.get(lease.key)
        state.histograms.store_s.observe((state.now_ns - lease.since_ns) / NS_PER_S)
        self._consider_compaction(lease.key)
        return session.num_tokens if session else 0

    def release(self, lease: StoreLease | RestoredLease) -> None:
        """End a lease; slots that are not committed are free again."""
        self._state.leases.end(lease)
        if isinstance(lease, StoreLease):
            for _, part in lease.parts:
                if isinstance(part, NewBlock):
                    self._free(lease, part)
            self._release(lease.parts)
        else:
            for slot_id, _ in lease.slots():
                self._state.free_slot(slot_id)
        self._state.outbox.space_freed()  # here only: a refused call frees nothing, and must not
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

    def _grant(self, lease: StoreLease, planned: list[PlannedBlock]) -> StoreAnswer | None:
        """Lease as many planned blocks as there are slots; None if no new block got one."""
        slots = self._state.slots
        blocks = []
        end_token = 0
        for new in planned:
            part: Block | NewBlock
            if new.block is None:
                if not slots.num_free:
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
        if not blocks:
            return None
        state = self._state
        state.leases.add(lease)
        state.tenants.charge(lease.key.tenant, len(blocks))
        state.mean_store_blocks += MEAN_SHARE * (len(blocks) - state.mean_store_blocks)
        self._journal(lease)
        more = end_token < planned[-1].token_offset + planned[-1].span.num_tokens
        return StoreAnswer(lease.lease_id, tuple(blocks), end_token, more)

    def _journal(self, lease: StoreLease | RestoredLease) -> None:
        for slot_id, generation in lease.slots():
            record = WritingSlot(generation, lease.lease_id, lease.engine_id)
            self._state.journal.put(slot_id, record)

    def _why_no_slot(self) -> str:
        """Whether waiting may help: leases end, reads end, writes make blocks clean."""
        state = self._state
        return (
            WAIT if len(state.leases) or state.under_way.reads or state.is_cleaning() else NO_SPACE
        )

    def _refused(self, why: str, stored_end: int) -> StoreAnswer:
        outbox = self._state.outbox
        if why == WAIT:
            outbox.want_wake()
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
                block = self._committed(lease.key.tenant, span, part)
                num_blocks += 1
                num_tokens += span.num_tokens
            else:  # another session has committed the same meanwhile
                self._free(lease, part)
            block.holders += 1
            lease.parts[index] = (span, block)
        if num_blocks:
            state.outbox.count("store_tokens", num_tokens)
            state.record_move(
                lease.key, MoveKind.STORED, num_blocks=num_blocks, num_tokens=num_tokens
            )

    def _committed(self, tenant: str, span: Span, part: NewBlock) -> Block:
        """Make a block of a filled slot. The journal forgets the slot until it is hashed."""
        state = self._state
        state.slots.commit(part.slot_id)
        state.clear_slot(part.slot_id)
        block = Block(
            span.block_key,
            span.num_tokens,
            tenant,
            part.token_ids,
            part.slot_id,
            part.generation,
        )
        state.blocks.add(block)
        return block

    def _shorten(self, lease: StoreLease, index: int) -> None:
        """Shorten a lease to its first parts."""
        released = lease.parts[index:]
        del lease.parts[index:]
        for _, part in released:
            if isinstance(part, NewBlock):
                self._free(lease, part)
        self._release(released)

    def _free(self, lease: StoreLease, part: NewBlock) -> None:
        """Free a slot that does not become a block."""
        self._state.free_slot(part.slot_id)
        self._state.tenants.charge(lease.key.tenant, -1)

    def _is_outdated(self, lease: StoreLease) -> bool:
        """Whether a discard has come since it was prepared: it is of another sequence."""
        session = self._state.sessions.get(lease.key)
        is_discarded = session is not None and session.num_discards != lease.num_discards
        return is_discarded or lease.is_outdated

    def _publish(self, key: SessionKey, parts: Sequence[Part], lineage: Lineage | None) -> None:
        """Make the parts the session's spans, creating it, and have its dirty blocks written."""
        state = self._state
        session = self._give(key, [span for span, _ in parts], lineage)
        if session is None:
            return
        state.outbox.count("stores")
        num_tokens, num_blocks = session.num_tokens, len(session.spans)
        state.policy.on_resize(key, num_tokens)
        state.placement.observe_size(num_blocks * state.layout.block_bytes)
        fields = {"num_tokens": num_tokens, "num_blocks": num_blocks}
        state.outbox.emit(SESSION_STORED, key, fields)
        self._hasher.request([state.blocks[block_key] for block_key in session.block_keys()])

    def _give(
        self, key: SessionKey, spans: Sequence[Span], lineage: Lineage | None
    ) -> Session | None:
        """Give a session these spans and use it, creating it; None: there is none, and no room."""
        state = self._state
        session = state.sessions.get(key)
        if not spans or (session is None and not self._has_room_for_session()):
            return None
        if session is None:
            session = Session(key, state.now_ns)
            state.add_session(session)
        state.tails.unpack(session)
        if session.spans[: len(spans)] != spans:
            session.lost = ""
            state.set_spans(session, spans)
        if lineage is not None and len(session.spans) == len(spans):
            session.lineage = lineage
        state.touch(session)
        state.outbox.index.session_used(key)
        return session

    def _has_room_for_session(self) -> bool:
        state = self._state
        return len(state.sessions) < state.limits.max_sessions or self._placement.drop_victim()

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
