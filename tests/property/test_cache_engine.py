"""Under random calls, completions and crashes no load is ever wrong, and nothing leaks."""

import struct
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvd.core.eviction.policies import POLICIES
from kvd.core.records.actions import (
    CompactTokens,
    HashSlot,
    IoOutcome,
    ReadBlock,
    VerifyExtent,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.entries import TTL_NEVER_NS, CommittedSlot, Pin
from kvd.core.records.errors import (
    ErasingError,
    LeaseLostError,
    ScrubError,
    SessionChangedError,
    TooManyLeasesError,
    UnknownLineageError,
    UnknownSessionError,
)
from kvd.core.records.records import Admission, LeaseState, LoadAnswer, StoreAnswer
from kvd.core.state.limits import Limits, TenantLimits
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE, Lineage
from shared.types.queue_delta import QueueChange, QueuedRequest, RunningRequest
from shared.types.session_key import SessionKey
from tests.property.cache_world import (
    ADOPTED_ENGINES,
    BLOCK_TOKENS,
    LAYOUT,
    MODEL,
    SHAPE,
    CacheWorld,
    Row,
    compute,
    to_bytes,
)
from tests.property.expecting_policy import ExpectingPolicy

KEYS = [SessionKey("a", MODEL, name) for name in "xyz"] + [SessionKey("b", MODEL, "x")]
ENGINE_IDS = [1, 2]
EXPORTER = 9  # holds what is exported, as an engine would
PHRASES = [[0] * 4, [0] * 2, [1] * 5, [0] * 8, [1, 0, 0, 0, 0, 0]]  # few, so that sessions share
TOKENS = st.sampled_from(PHRASES)


@dataclass
class Conversation:
    """What an engine knows of a session: its tokens, and the KV row each one has.

    Once something was discarded, `known` has every row the session ever had, with its token: a kvd
    that crashed may come back with an older state of the session, whose rows do not follow from the
    tokens alone.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    discarded: bool = False
    known: dict[Row, int] = field(default_factory=dict)
    lineage: Lineage = WHOLE  # as it is named, if its engine names any

    def replace(self, tokens: list[int], rows: list[Row]) -> None:
        """Go on with other tokens and rows."""
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
    is_restored: bool = False  # its kvd was killed: only the slots are still its own


class CacheMachine(RuleBasedStateMachine):
    """See the module docstring."""

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
            num_slots,
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
        )
        self.world = CacheWorld(limits, policy)
        self.names_lineage = names_lineage
        self.requests: dict[int, dict[int, SessionKey]] = {
            engine_id: {} for engine_id in ENGINE_IDS
        }  # by number
        self.num_requests = 0
        self.ids = {
            engine_id: engine_id for engine_id in ENGINE_IDS
        }  # an engine gets a new id as it attaches
        self.detached: set[int] = set()
        self.scrub_id = 0
        self.conversations = {key: Conversation() for key in KEYS}
        self.loads: list[Load] = []
        self.stores: list[Store] = []

    # --------------------------------------------------------------------------------------- turns

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
        """Copy what is granted, then complete: only then is it trusted.

        An engine that follows the progress words never settles.
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
                is_whole = not is_pending and info.num_slots == len(
                    {span.slot_id for span in answer.spans}
                )
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
        """Each row follows from those before it, or was the session's before a discard."""
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
        return rows

    @rule(
        key=st.sampled_from(KEYS),
        new_tokens=TOKENS,
        engine_id=st.sampled_from(ENGINE_IDS),
        is_quiet=st.booleans(),
    )
    def turn(self, key, new_tokens, engine_id, is_quiet) -> None:
        """A whole turn, without anything in between: load all there is, compute, store."""
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
                )
            except TooManyLeasesError:
                return
            if answer.lease_id:
                for block in answer.blocks:
                    end = block.token_offset + block.num_tokens
                    self.world.slots[block.slot_id] = conversation.rows[block.token_offset : end]
                stored = engine.stores.complete(answer.lease_id, self.ids[engine_id], success=True)
                assert stored in (0, answer.end_token)
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
            )
        except TooManyLeasesError:
            return
        assert bool(answer.lease_id) == bool(answer.blocks), "a lease has slots"
        for block in answer.blocks:
            rows = conversation.rows[block.token_offset : block.token_offset + block.num_tokens]
            assert block.token_offset >= from_token, "the engine is asked for KV it holds"
            self.world.slots[block.slot_id] = rows
        if answer.lease_id:
            self.stores.append(Store(answer, engine_id, list(conversation.rows)))
        self.world.pump()

    @rule(key=st.sampled_from(KEYS), kept=st.integers(0, 30))
    def regenerate(self, key, kept) -> None:
        """Go back to a point in the conversation; the next turn goes on from there."""
        conversation = self.conversations[key]
        if not conversation.discarded:
            conversation.replace(conversation.tokens[:kept], conversation.rows[:kept])

    def _recompute_lost(self, key: SessionKey) -> int:
        """After a discard, rows that kvd has lost are computed anew, on top of those it has.

        An engine that names the lineage may go on with those it has itself. Returns the number of
        tokens kvd has stored.
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

    @rule(source=st.sampled_from(KEYS), fork=st.sampled_from(KEYS), at=st.integers(0, 30))
    def fork(self, source, fork, at) -> None:
        """Start a session over with the first tokens of another one."""
        if self.loads or self.stores:
            return
        if self._stored(fork):
            self.world.engine.sessions.flush(fork, dry_run=False)
        tokens = self.conversations[source].tokens[:at]
        self.conversations[fork].replace(tokens, compute([], tokens))
        self.conversations[fork].lineage = WHOLE
        self.world.pump()

    @rule(
        key=st.sampled_from(KEYS),
        start=st.integers(0, 20),
        length=st.integers(1, 9),
        is_heard=st.booleans(),
    )
    def discard(self, key, start, length, is_heard) -> None:
        if start + length <= len(self.conversations[key].tokens):
            self._discard(key, [(start, start + length)], is_heard=is_heard)

    @rule(key=st.sampled_from(KEYS), start=st.integers(0, 5), step=st.integers(2, 4))
    def discard_scattered(self, key, start, step) -> None:
        num_tokens = len(self.conversations[key].tokens)
        ranges = [(at, at + 1) for at in range(start, num_tokens, step)]
        if ranges:
            self._discard(key, ranges, is_heard=True)

    @rule(
        key=st.sampled_from(KEYS),
        engine_id=st.sampled_from(ENGINE_IDS),
        phrases=st.lists(TOKENS, min_size=1, max_size=3),
        start=st.integers(0, 9),
    )
    def thin_out(self, key, engine_id, phrases, start) -> None:
        """A session grows, loses every other token, and is left alone for a while."""
        for phrase in phrases:
            self.turn(key, phrase, engine_id, is_quiet=True)
        self.discard_scattered(key, start, 2)
        self.world.quiesce()
        self.wait(20)

    def _discard(self, key, ranges, *, is_heard) -> None:
        """Report it to kvd, if it runs: one that missed it must find out by the lineage."""
        if self.stores and not self.names_lineage:
            return
        conversation = self.conversations[key]
        self._recompute_lost(key)
        token_ids = to_bytes(conversation.tokens)
        if is_heard or not self.names_lineage:
            self.world.engine.sessions.discard(
                key, token_ids, ranges, lineage=self._named(conversation)
            )
        conversation.discarded = True
        if self.names_lineage:
            conversation.lineage = conversation.lineage.after(token_ids, ranges)
        dropped = {position for start, end in ranges for position in range(start, end)}
        kept = [at for at in range(len(conversation.tokens)) if at not in dropped]
        conversation.replace(
            [conversation.tokens[at] for at in kept], [conversation.rows[at] for at in kept]
        )
        self._recompute_lost(key)
        self.world.pump()

    # ----------------------------------------------------------------------------------- operators

    def _named(self, conversation: Conversation) -> Lineage | None:
        return conversation.lineage if self.names_lineage else None

    def _num_stored(self, key: SessionKey) -> int:
        info = self.world.engine.inspection.info(key)
        return info.num_tokens if info else 0

    def _stored(self, key: SessionKey) -> bool:
        return self._num_stored(key) > 0

    @rule(key=st.sampled_from(KEYS), what=st.sampled_from([*Pin, "end", "ttl", "never"]))
    def change(self, key, what) -> None:
        engine = self.world.engine
        if not self._stored(key):
            assert not engine.sessions.end(key)
        elif what is Pin.NONE:
            engine.sessions.pin(key, Pin.NONE)
        elif isinstance(what, Pin):
            engine.sessions.pin(key, what)
        elif what == "end":
            assert engine.sessions.end(key)
        else:
            engine.sessions.set_ttl(key, 30 if what == "ttl" else TTL_NEVER_NS)
        self.world.pump()

    @rule(key=st.sampled_from([None, *KEYS]), dry_run=st.sampled_from([True, True, False]))
    def flush(self, key, dry_run) -> None:
        engine = self.world.engine
        if key is None or self._stored(key):
            before = engine.inspection.stats()
            answer = engine.sessions.flush(key, dry_run=dry_run)
            assert (engine.inspection.stats() == before) or not dry_run, "a dry run changes nothing"
            assert answer.num_sessions + len(answer.skipped_leased) <= max(1, before.num_sessions)
        self.world.pump()

    @precondition(lambda self: len(self.world.index.sessions) > 1)
    @rule(
        tenant=st.sampled_from("ab"),
        at_once=st.integers(1, 3),
        newest_first=st.booleans(),
        other=st.sampled_from(KEYS),
    )
    def erase(self, tenant, at_once, newest_first, other) -> None:
        """Nothing of a tenant is left anywhere; its engines' leases are lost or worth nothing."""
        world, engine = self.world, self.world.engine
        engine.erasing.begin(lambda name: name == tenant)
        self.loads = [load for load in self.loads if not self._is_lost(load)]
        if other.tenant == tenant:
            with pytest.raises(ErasingError):
                engine.loads.prepare(other, b"", 0, self.ids[1])
        else:
            self.turn(other, [0, 1], 1, is_quiet=True)
        while not engine.erasing.is_gone():
            engine.erasing.step(at_once)
            world.pump()
            world.quiesce(newest_first=newest_first)
        assert not any(
            usage.num_sessions for usage in engine.inspection.tenants if usage.tenant == tenant
        )
        world.quiesce()  # the keys are dropped behind these rows
        assert not any(key.tenant == tenant for key in world.index.sessions)
        assert tenant not in world.tenants_on_ssd()
        engine.erasing.wipe()
        world.pump()
        if other.tenant != tenant:
            self.turn(other, [1], 1, is_quiet=True)
        world.quiesce(newest_first=newest_first)
        assert not engine.erasing.is_wiping()
        assert engine.erasing.is_wiped()
        engine.erasing.end()
        world.pump()

    def _is_lost(self, load: Load) -> bool:
        return self.world.engine.loads.state_of(load.answer.lease_id) is LeaseState.LOST

    # --------------------------------------------------------------------------------------- queue

    @rule(
        engine_id=st.sampled_from(ENGINE_IDS),
        keys=st.lists(st.sampled_from(KEYS), max_size=4),
        num_running=st.integers(0, 2),
        interval_ns=st.sampled_from([0, 5, 100]),
    )
    def replace_queue(self, engine_id, keys, num_running, interval_ns) -> None:
        if engine_id in self.detached:
            return
        requests = self.requests[engine_id] = dict(enumerate(keys, self.num_requests))
        self.num_requests += len(keys)
        numbers = list(requests)
        change = QueueChange(
            [QueuedRequest((0, 0.0, number), requests[number]) for number in numbers[num_running:]],
            [RunningRequest(number, requests[number]) for number in numbers[:num_running]],
            interval_ns=interval_ns,
        )
        self.world.engine.engines.replace_queue(self.ids[engine_id], change)
        self.world.pump()

    @rule(
        engine_id=st.sampled_from(ENGINE_IDS),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
        turns=st.lists(st.tuples(st.sampled_from(KEYS), TOKENS), max_size=3),
    )
    def begin_a_day(self, engine_id, keys, turns) -> None:
        """Sessions are on SSD only, as far as it has them, and some are asked for."""
        for key, new_tokens in turns:
            self.turn(key, new_tokens, engine_id, is_quiet=True)
        self.world.quiesce()
        self.world.engine.release_dram()
        self.world.pump()
        self.world.quiesce()
        self.replace_queue(engine_id, keys, 0, 100)

    @rule(
        engine_id=st.sampled_from(ENGINE_IDS),
        joining=st.lists(st.sampled_from(KEYS), max_size=2),
        data=st.data(),
    )
    def change_queue(self, engine_id, joining, data) -> None:
        """Some join, some move, some start or go on waiting, some leave."""
        if engine_id in self.detached:
            return
        requests = self.requests[engine_id]
        what = {n: data.draw(st.sampled_from(["stay", "wait", "run", "leave"])) for n in requests}
        for key in joining:
            what[self.num_requests] = "wait"
            requests[self.num_requests] = key
            self.num_requests += 1
        change = QueueChange(
            [
                QueuedRequest((data.draw(st.integers(-1, 1)), 0.0, number), requests[number])
                for number, how in what.items()
                if how == "wait"
            ],
            [
                RunningRequest(number, requests[number])
                for number, how in what.items()
                if how == "run"
            ],
            [number for number, how in what.items() if how == "leave"],
        )
        for number in change.left:
            del requests[number]
        self.world.engine.engines.change_queue(self.ids[engine_id], change)
        self.world.pump()

    @precondition(lambda self: len(self.loads) + len(self.stores) > 2)
    @rule(engine_id=st.sampled_from(ENGINE_IDS))
    def engine_gone(self, engine_id) -> None:
        engine = self.world.engine
        engine.engines.gone(self.ids[engine_id])
        self._forget_loads(engine_id)
        for store in [store for store in self.stores if store.engine_id == engine_id]:
            self.stores.remove(store)
            with pytest.raises(LeaseLostError):
                engine.stores.complete(store.answer.lease_id, self.ids[engine_id], success=True)
        self._attach_anew(engine_id)
        self.world.pump()

    def _forget_loads(self, engine_id: int) -> None:
        for load in [load for load in self.loads if load.engine_id == engine_id]:
            self.loads.remove(load)
            state = self.world.engine.loads.state_of(load.answer.lease_id)
            assert state is LeaseState.LOST, "loads end with the connection"

    def _attach_anew(self, engine_id: int) -> None:
        self.requests[engine_id] = {}
        self.ids[engine_id] += len(ENGINE_IDS)
        self.detached.discard(engine_id)

    @precondition(lambda self: self.stores)
    @rule(engine_id=st.sampled_from(ENGINE_IDS))
    def detach(self, engine_id) -> None:
        """The engine's connection ends, its process lives, and may go on to write."""
        if engine_id in self.detached:
            return
        engine = self.world.engine
        engine.engines.detach(self.ids[engine_id])
        self.detached.add(engine_id)
        self.requests[engine_id] = {}
        self._forget_loads(engine_id)
        held = sorted(s.answer.lease_id for s in self.stores if s.engine_id == engine_id)
        assert [
            i.lease_id for i in engine.inspection.leases() if i.engine_id == self.ids[engine_id]
        ] == held
        self.world.pump()

    @precondition(lambda self: self.detached)
    @rule(data=st.data())
    def reattach(self, data) -> None:
        """The engine comes back and says what it holds; of the rest it knows nothing."""
        engine_id = data.draw(st.sampled_from(sorted(self.detached)))
        stores = [store for store in self.stores if store.engine_id == engine_id]
        kept = [store for store in stores if data.draw(st.booleans())]
        for store in stores:
            self._check_slots(store)
            if store not in kept:
                self.stores.remove(store)
        held = [store.answer.lease_id for store in kept]
        old_id = self.ids[engine_id]
        self._attach_anew(engine_id)
        confirmed, lost = self.world.engine.engines.reattach(
            old_id, self.ids[engine_id], [*held, 1]
        )
        assert (list(confirmed), lost) == (held, (1,)), "what an engine writes to stays its own"
        self.world.pump()

    # -------------------------------------------------------------------------------------- scrubs

    @rule(repair=st.booleans(), at_once=st.booleans())
    def scrub(self, repair, at_once) -> None:
        """Begin a scrub, or go on with the one under way."""
        engine = self.world.engine
        if self.scrub_id:
            with pytest.raises(ScrubError):
                engine.scrubs.begin(repair=repair)
        else:
            self.scrub_id = engine.scrubs.begin(repair=repair)
        step = engine.scrubs.step(self.scrub_id, 1 << 30 if at_once else 1)
        self.world.pump()
        if step.done:
            assert not self.world.io_of(VerifyExtent)
            self.scrub_id = 0

    @precondition(lambda self: self.scrub_id)
    @rule()
    def scrub_end(self) -> None:
        self.world.engine.scrubs.end(self.scrub_id)
        self.world.checked.clear()  # what it had under way finds nothing any more
        self.scrub_id = 0
        self.world.pump()

    # --------------------------------------------------------------------------------------- world

    @rule(elapsed_ns=st.sampled_from([1, 20, 100, 3_000_000_000]))
    def wait(self, elapsed_ns) -> None:
        self.world.now_ns += elapsed_ns
        self.world.engine.expire()
        deadline_ns = self.world.engine.next_deadline_ns()
        assert deadline_ns is None or deadline_ns > self.world.now_ns, "what is due is done"
        self.world.pump()

    @precondition(lambda self: self.world.io)
    @rule(data=st.data(), failure=st.sampled_from([IoOutcome.OK] * 4 + [*IoOutcome]))
    def finish_io(self, data, failure) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.world.io)))
        self.world.finish_io(op_id, self._possible(op_id, failure))

    @rule(
        kind=st.sampled_from(
            [HashSlot, HashSlot, ReadBlock, VerifySlot, VerifyExtent, WriteBlock, CompactTokens]
        )
    )
    def finish_kind(self, kind) -> None:
        self.world.finish_all(kind)

    def _possible(self, op_id: int, outcome: IoOutcome) -> IoOutcome:
        """Damage is done only to copies that are compared before the next use."""
        action = self.world.io[op_id]
        is_write = isinstance(action, WriteBlock)
        impossible = IoOutcome.CORRUPT if is_write else IoOutcome.FULL
        if isinstance(action, HashSlot):
            impossible = IoOutcome.CORRUPT
        return IoOutcome.TRANSIENT if outcome is impossible else outcome

    @rule(key=st.sampled_from(KEYS), max_spans=st.integers(1, 3), gives_up=st.booleans())
    def export(self, key, max_spans, gives_up) -> None:
        """An operator takes a copy of a session: its rows are those of its tokens."""
        engine = self.world.engine
        tokens: list[int] = []
        rows: list[Row] = []
        refusals = UnknownSessionError, UnknownLineageError, TooManyLeasesError, SessionChangedError
        with suppress(*refusals):
            export = engine.session_files.begin_export(key)
            while not export.is_done:
                answer = engine.session_files.prepare_export(export, max_spans, EXPORTER)
                self.world.pump()
                if answer.lookup is Lookup.PENDING:
                    self.world.quiesce()
                    answer = engine.loads.settle(answer.lease_id)
                if answer.lookup is Lookup.MISS or gives_up:
                    break
                for part in engine.session_files.exported(export, answer.lease_id):
                    slot = self.world.slots[part.slot_id]
                    rows += slot[part.start : part.start + part.num_tokens]
                    tokens += struct.unpack(f"<{part.num_tokens}I", part.token_ids)
                engine.loads.complete(answer.lease_id, EXPORTER)
                self.world.pump()
            known = self.conversations[key].known
            is_right = rows == compute([], tokens) or not export.lineage.is_whole
            assert is_right or all(
                known.get(row) == token for row, token in zip(rows, tokens, strict=True)
            )
        engine.engines.gone(EXPORTER)
        self.world.pump()

    @rule(
        max_sessions=st.sampled_from([1, 2, 100]),
        max_leases=st.sampled_from([3, 100]),
        ttl_ns=st.sampled_from([None, 10, 50]),
        admission=st.sampled_from(Admission),
        quota_blocks=st.sampled_from([None, 2, 4]),
        watermark=st.sampled_from([0, 0.4]),
    )
    def set_limits(
        self, max_sessions, max_leases, ttl_ns, admission, quota_blocks, watermark
    ) -> None:
        """An operator reloads the settings; a restart finds them, too."""
        quota_bytes = None if quota_blocks is None else quota_blocks * LAYOUT.block_bytes
        self.world.limits = replace(
            self.world.limits,
            max_sessions=max_sessions,
            max_leases=max_leases,
            default_ttl_ns=ttl_ns,
            admission=admission,
            tenant_limits=lambda tenant: TenantLimits(
                quota_bytes=quota_bytes if tenant == "a" else None
            ),
            watermark=watermark,
        )
        self.world.engine.set_limits(self.world.limits)
        self.world.pump()

    @rule(num_extents=st.sampled_from([0, 1, 3, 20]))
    def set_capacity(self, num_extents) -> None:
        """The file system has less room than it seemed, or more."""
        if self.world.limits.num_extents:
            self.world.engine.writes.set_capacity(num_extents)
            self.world.pump()

    @precondition(lambda self: not self.stores)
    @rule()
    def release_dram(self) -> None:
        """The layout gives its arena up, as far as it can, and gets another."""
        engine = self.world.engine
        if engine.release_dram():
            engine.drop_slots()
            self.world.pump()
            engine.add_slots(self.world.limits.num_slots, 1)
        self.world.pump()

    @rule()
    def write_dirty(self) -> None:
        self.world.engine.write_dirty()
        self.world.pump()

    @rule(num_actions=st.integers(1, 20))
    def commit(self, num_actions) -> None:
        self.world.commit(num_actions)

    @rule(row_bytes=st.sampled_from([0, 1, 600, 2000]))
    def index_falls_behind(self, row_bytes) -> None:
        """It takes little at a time, or nothing, until all is brought to an end."""
        self.world.row_bytes = row_bytes

    @rule(newest_first=st.booleans())
    def finish_all_io(self, newest_first) -> None:
        self.world.quiesce(newest_first=newest_first)

    @precondition(lambda self: self.world.index.sessions)
    @rule(
        num_committed=st.integers(0, 5),
        keep_dram=st.booleans(),
        alive=st.sets(st.sampled_from(ENGINE_IDS)),
        data=st.data(),
    )
    def kill(self, num_committed, keep_dram, alive, data) -> None:
        """A new kvd starts on what is left: the index, perhaps the arena, with wrong bytes."""
        world = self.world
        world.index.commit(num_committed)
        for slot_id, record in world.journal.items():
            if isinstance(record, CommittedSlot) and data.draw(st.integers(0, 5)) == 0:
                world.damage_slot(slot_id)
        self.loads, self.scrub_id = [], 0
        alive_ids = {self.ids[engine_id] for engine_id in alive} if keep_dram else set()
        self.stores = [
            replace(store, is_restored=True)
            for store in self.stores
            if self.ids[store.engine_id] in alive_ids
        ]
        self.detached = {store.engine_id for store in self.stores}
        for engine_id in ENGINE_IDS:
            self.ids[engine_id] += ADOPTED_ENGINES
            self.requests[engine_id] = {}
        world.start(keep_dram=keep_dram, alive=alive_ids)

    def teardown(self) -> None:
        """When everybody leaves and all is flushed, nothing is left."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for engine_id in ENGINE_IDS:
            world.engine.engines.gone(self.ids[engine_id])
        world.engine.scrubs.end(self.scrub_id)
        world.engine.sessions.flush(None, dry_run=False)
        world.pump()
        world.quiesce()
        stats = world.engine.inspection.stats()
        assert [tier.used_bytes for tier in stats.tiers] == [0, 0], "nothing leaks"
        assert not world.index.blocks
        assert not world.index.sessions
        assert not world.journal
        assert not world.tracked


CacheMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheEngine = CacheMachine.TestCase


@pytest.mark.long
class TestCacheEngineLong(CacheMachine.TestCase):
    """The same, at length."""

    settings = settings(CacheMachine.TestCase.settings, max_examples=3000, stateful_step_count=120)


assert BLOCK_TOKENS == 4  # sizes above are chosen for it
