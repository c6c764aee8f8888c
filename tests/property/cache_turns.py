"""Turns of a random cache machine: engines load, compute and store, and check what they load."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvd.core.eviction.policies import POLICIES
from kvd.core.records.errors import LeaseLostError, TooManyLeasesError
from kvd.core.records.records import LeaseState, LoadAnswer, StoreAnswer
from kvd.core.records.tier import Admission
from kvd.core.state.limits import Limits, TenantLimits
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE, Lineage
from shared.types.session_key import SessionKey
from tests.property.cache_world import LAYOUT, MODEL, SHAPE, CacheWorld, Row, compute, to_bytes
from tests.property.expecting_policy import ExpectingPolicy

KEYS = [SessionKey("a", MODEL, name) for name in "xyz"] + [SessionKey("b", MODEL, "x")]
ENGINE_IDS = [1, 2]
EXPORTER = 9  # the engine that holds exported blocks, as a real one would
PHRASES = [[0] * 4, [0] * 2, [1] * 5, [0] * 8, [1, 0, 0, 0, 0, 0]]  # few, so that sessions share
TOKENS = st.sampled_from(PHRASES)


@dataclass
class Conversation:
    """A session as its engine has it: its tokens, and the KV row of each one.

    Once something was discarded, `known` has every row the session ever had, with its token: a kvd
    that crashed may come back with an older state of the session, whose rows do not follow from the
    tokens alone.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    discarded: bool = False
    known: dict[Row, int] = field(default_factory=dict)
    lineage: Lineage = WHOLE  # the lineage as the engine names it, if it names any

    def replace(self, tokens: list[int], rows: list[Row]) -> None:
        """Continue with other tokens and rows."""
        self.tokens, self.rows = tokens, rows
        self.known.update(zip(rows, tokens, strict=True))


@dataclass
class Load:
    """A load lease as its engine sees it."""

    answer: LoadAnswer
    engine_id: int
    conversation: Conversation
    from_token: int


@dataclass
class Store:
    """A store lease as its engine sees it."""

    answer: StoreAnswer
    engine_id: int
    rows: list[Row]
    is_restored: bool = False  # its kvd was killed: only the slots still belong to the lease


def _slots_of(answer: LoadAnswer) -> set[int]:
    """Return every slot that a load is granted."""
    slots = {span.slot_id for span in answer.spans}
    slots.update(answer.state.slot_ids if answer.state else ())
    slots.update(slot_id for window in answer.windows for slot_id in window.slot_ids)
    return slots


class TurnsMachine(RuleBasedStateMachine):
    """Conversations of a few sessions, and the leases of their engines."""

    layout = LAYOUT
    scale = 1  # of the arena

    def _positions(self, tokens: list[int]) -> list[int]:
        """Return the token counts at which loads of these tokens should be able to end."""
        return []

    @initialize(
        num_slots=st.sampled_from([1, 3, 5, 12]),
        num_extents=st.sampled_from([0, 3, 8, 20, 40]),
        max_sessions=st.sampled_from([2, 100]),
        max_leases=st.sampled_from([3, 100]),
        ttl_ns=st.sampled_from([None, 50]),
        admission=st.sampled_from(Admission),
        max_write_bytes=st.sampled_from([1, 1 << 20]),
        verify_on_load=st.booleans(),
        packs_sessions=st.booleans(),
        quota_blocks=st.sampled_from([None, 4]),
        policy=st.sampled_from([*POLICIES.values(), ExpectingPolicy]),
        watermark=st.sampled_from([0, 0.2, 0.4]),
        prefetch_blocks=st.sampled_from([0, 1, 1, 100]),
        max_waste=st.sampled_from([0.2, 1]),
        names_lineage=st.booleans(),
    )
    def start(
        self,
        num_slots,
        num_extents,
        max_sessions,
        max_leases,
        ttl_ns,
        admission,
        max_write_bytes,
        verify_on_load,
        packs_sessions,
        quota_blocks,
        policy,
        watermark,
        prefetch_blocks,
        max_waste,
        names_lineage,
    ) -> None:
        quota_bytes = None if quota_blocks is None else quota_blocks * LAYOUT.block_bytes
        limits = Limits(
            num_slots * self.scale,
            num_extents,
            ttl_ns,
            max_sessions,
            max_leases,
            admission=admission,
            write_back_delay_ns=30,
            max_write_bytes=max_write_bytes,
            verify_on_load=verify_on_load,
            layered_read_bytes=30_000,
            tenant_limits=lambda tenant: TenantLimits(
                quota_bytes=quota_bytes if tenant == "a" else None
            ),
            packs_sessions=packs_sessions,
            watermark=watermark,
            prefetch_bytes=prefetch_blocks * SHAPE.full_bytes,
            max_waste=max_waste,
            compact_rest_ns=20,
            announces_evictions=True,
        )
        self.world = CacheWorld(limits, policy, self.layout)
        self.names_lineage = names_lineage
        self.requests: dict[int, dict[int, SessionKey]] = {
            engine_id: {} for engine_id in ENGINE_IDS
        }  # leases by number
        self.num_requests = 0
        self.ids = {
            engine_id: engine_id for engine_id in ENGINE_IDS
        }  # an engine gets a new id as it attaches
        self.detached: set[int] = set()
        self.scrub_id = 0
        self.conversations = {key: Conversation() for key in KEYS}
        self.loads: list[Load] = []
        self.stores: list[Store] = []

    @rule(
        key=st.sampled_from(KEYS),
        engine_id=st.sampled_from(ENGINE_IDS),
        skip=st.integers(0, 20),
        dram_only=st.booleans(),
    )
    def prepare_load(self, key, engine_id, skip, dram_only) -> None:
        if engine_id in self.detached:
            return
        conversation = self.conversations[key]
        # rows before from_token are known only where they follow from the tokens alone
        from_token = 0 if conversation.discarded else min(skip, len(conversation.tokens))
        snapshot = replace(conversation, tokens=list(conversation.tokens))
        try:
            answer = self.world.engine.loads.prepare(
                key,
                to_bytes(conversation.tokens),
                from_token,
                self.ids[engine_id],
                dram_only=dram_only,
                lineage=self._named(conversation),
            )
        except TooManyLeasesError:
            answer = LoadAnswer(Lookup.MISS, miss_reason="bound")
        assert not dram_only or all(span.tier == "dram" for span in answer.spans)
        if answer.lookup is Lookup.MISS:
            assert answer.miss_reason, "a miss has a reason"
        else:
            self.loads.append(Load(answer, engine_id, snapshot, from_token))
        self.world.pump()

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), patience=st.sampled_from(["wait", "wait", "deadline", "follow"]))
    def finish_load(self, data, patience) -> None:
        """Copy the granted rows, then complete; only then are they

        trusted. ¶ An engine that follows the progress words never settles.
        """
        engine = self.world.engine
        load = data.draw(st.sampled_from(self.loads))
        lease_id, answer = load.answer.lease_id, load.answer
        is_pending = engine.loads.state_of(lease_id) is LeaseState.PENDING
        if is_pending and patience == "wait":
            return
        self.loads.remove(load)
        is_whole = True
        try:
            if answer.lookup is Lookup.PENDING and patience == "follow":
                info = next(
                    info for info in engine.inspection.leases() if info.lease_id == lease_id
                )
                is_whole = not is_pending and info.num_slots == len(_slots_of(answer))
            elif answer.lookup is Lookup.PENDING:
                answer = engine.loads.settle(lease_id)
            if answer.lookup is not Lookup.MISS:
                engine.loads.complete(lease_id, self.ids[load.engine_id])
                if is_whole:
                    self._check_rows(load, answer)
        except (LeaseLostError, StopIteration):
            assert engine.loads.state_of(lease_id) is LeaseState.LOST, "found corrupt by a scrub"
        self.world.pump()

    def _check_rows(self, load: Load, answer: LoadAnswer) -> list[Row]:
        """Check that each row follows from those before, or was the session's before a discard."""
        conversation = load.conversation
        rows = compute([], conversation.tokens[: load.from_token])
        if conversation.discarded:
            rows = conversation.rows[: load.from_token]
        for span in answer.spans:
            assert span.token_offset == len(rows), "spans follow each other"
            slot = self.world.slots[span.slot_id]
            for row in slot[span.start : span.start + span.num_tokens]:
                token = conversation.tokens[len(rows)]
                was_had = conversation.discarded and conversation.known.get(row) == token
                assert was_had or row == compute(rows, [token])[-1], "a load is right"
                rows.append(row)
        assert len(rows) == answer.end_token, "spans cover what the answer says"
        self._check_state(rows, answer)
        return rows

    def _check_state(self, rows: list[Row], answer: LoadAnswer) -> None:
        """Check what is granted beside the rows."""
        assert answer.state is None, "there are no states"
        assert not answer.windows, "there are no windows"

    def _fill(self, answer: StoreAnswer, rows: list[Row]) -> None:
        """Write the granted slots."""
        for block in answer.blocks:
            end = block.token_offset + block.num_tokens
            self.world.slots[block.slot_id] = rows[block.token_offset : end]

    @rule(
        key=st.sampled_from(KEYS),
        new_tokens=TOKENS,
        engine_id=st.sampled_from(ENGINE_IDS),
        is_quiet=st.booleans(),
    )
    def turn(self, key, new_tokens, engine_id, is_quiet) -> None:
        """Run a whole turn without interruption: load all there is, compute, store."""
        if engine_id in self.detached:
            return
        engine, conversation = self.world.engine, self.conversations[key]
        rows: list[Row] = []
        more = True
        while more:
            token_ids = to_bytes(conversation.tokens)
            attached_id = self.ids[engine_id]
            try:
                answer = engine.loads.prepare(
                    key, token_ids, len(rows), attached_id, lineage=self._named(conversation)
                )
            except TooManyLeasesError:
                break
            self.world.pump()
            if answer.lookup is Lookup.PENDING:
                self.world.quiesce()
                answer = engine.loads.settle(answer.lease_id)
            if answer.lookup is Lookup.MISS:
                break
            rows = self._check_rows(Load(answer, engine_id, conversation, len(rows)), answer)
            conversation.replace(
                conversation.tokens, compute(rows, conversation.tokens[len(rows) :])
            )
            engine.loads.complete(answer.lease_id, attached_id)
            self.world.pump()
            more = answer.more
        is_told = conversation.discarded and not self.names_lineage
        if is_told and len(rows) < self._num_stored(key):
            return  # what is stored was computed before the discard; computing it anew would differ
        tokens = conversation.tokens + new_tokens
        rows = compute(rows, tokens[len(rows) :])
        conversation.replace(tokens, rows)
        self._store_all(key, engine_id)
        if is_quiet:
            self.world.quiesce()

    def _store_all(self, key: SessionKey, engine_id: int) -> None:
        engine, conversation = self.world.engine, self.conversations[key]
        more, from_token = True, 0
        while more:
            token_ids = to_bytes(conversation.tokens)
            try:
                answer = engine.stores.prepare(
                    key,
                    token_ids,
                    from_token,
                    self.ids[engine_id],
                    lineage=self._named(conversation),
                    load_ends=self._positions(conversation.tokens),
                )
            except TooManyLeasesError:
                return
            if answer.lease_id:
                self._fill(answer, conversation.rows)
                stored = engine.stores.complete(answer.lease_id, self.ids[engine_id], success=True)
                if answer.blocks:
                    assert stored in (0, answer.end_token)
                else:  # parts beside stored tokens: the session keeps what it has beyond
                    assert stored == 0 or stored >= answer.end_token
            assert answer.end_token > from_token or not answer.more, "asking again gets further"
            more, from_token = answer.more, answer.end_token
            self.world.pump()

    @rule(
        key=st.sampled_from(KEYS),
        new_tokens=TOKENS,
        engine_id=st.sampled_from(ENGINE_IDS),
        held_from=st.sampled_from(["start", "stored", "stored", "end"]),
    )
    def prepare_store(self, key, new_tokens, engine_id, held_from) -> None:
        if engine_id in self.detached:
            return
        conversation = self.conversations[key]
        num_stored = self._recompute_lost(key)
        rows = compute(conversation.rows, new_tokens)
        conversation.replace(conversation.tokens + new_tokens, rows)
        num_tokens = len(conversation.tokens)
        from_token = {"start": 0, "stored": min(num_stored, num_tokens), "end": num_tokens}[
            held_from
        ]
        try:
            answer = self.world.engine.stores.prepare(
                key,
                to_bytes(conversation.tokens),
                from_token,
                self.ids[engine_id],
                lineage=self._named(conversation),
                load_ends=self._positions(conversation.tokens),
            )
        except TooManyLeasesError:
            return
        has_slots = bool(answer.blocks or answer.states or answer.windows)
        assert bool(answer.lease_id) == has_slots, "a lease has slots"
        for block in answer.blocks:
            assert block.token_offset >= from_token, "the engine is asked for KV it holds"
        self._fill(answer, conversation.rows)
        if answer.lease_id:
            self.stores.append(Store(answer, engine_id, list(conversation.rows)))
        self.world.pump()

    @rule(key=st.sampled_from(KEYS), kept=st.integers(0, 30))
    def regenerate(self, key, kept) -> None:
        """Go back to an earlier point of the conversation; the next turn continues from there."""
        conversation = self.conversations[key]
        if not conversation.discarded:
            conversation.replace(conversation.tokens[:kept], conversation.rows[:kept])

    def _recompute_lost(self, key: SessionKey) -> int:
        """Compute the rows that kvd has lost after a discard, on top of those it has. ¶ An

        engine that names the lineage may continue with the rows it has itself. Returns the number
        of tokens kvd has stored.
        """
        conversation = self.conversations[key]
        num_kept = self._num_stored(key)
        if self.names_lineage:
            return num_kept
        if conversation.discarded and num_kept < len(conversation.rows):
            rows = compute(conversation.rows[:num_kept], conversation.tokens[num_kept:])
            conversation.replace(conversation.tokens, rows)
        return num_kept

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def complete_store(self, data, success) -> None:
        store = data.draw(st.sampled_from(self.stores))
        self._check_slots(store)
        if store.engine_id in self.detached:
            return
        self.stores.remove(store)
        lease_id, attached_id = store.answer.lease_id, self.ids[store.engine_id]
        with pytest.raises(LeaseLostError) if store.is_restored else nullcontext():
            self.world.engine.stores.complete(lease_id, attached_id, success=success)
        self.world.pump()

    def _check_slots(self, store: Store) -> None:
        for block in store.answer.blocks:
            rows = store.rows[block.token_offset : block.token_offset + block.num_tokens]
            assert self.world.slots[block.slot_id] == rows, "a leased slot is nobody else's"

    def _named(self, conversation: Conversation) -> Lineage | None:
        return conversation.lineage if self.names_lineage else None

    def _num_stored(self, key: SessionKey) -> int:
        info = self.world.engine.inspection.info(key)
        return info.num_tokens if info else 0

    def _stored(self, key: SessionKey) -> bool:
        return self._num_stored(key) > 0
