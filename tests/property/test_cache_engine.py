"""Under random calls, completions and crashes no load is ever wrong, and nothing leaks."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvd.core.actions import IoOutcome
from kvd.core.engine import Limits
from kvd.core.errors import LeaseLostError, TooManyLeasesError
from kvd.core.records import TTL_NEVER_NS, LeaseState, LoadAnswer, Lookup, QueuedJob, StoreAnswer
from shared.session_key import SessionKey
from tests.property.cache_world import BLOCK_TOKENS, MODEL, CacheWorld, Row, compute, to_bytes

KEYS = [SessionKey("a", MODEL, name) for name in "xyz"] + [SessionKey("b", MODEL, "x")]
OWNERS = [1, 2]
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

    def replace(self, tokens: list[int], rows: list[Row]) -> None:
        """Go on with other tokens and rows."""
        self.tokens, self.rows = tokens, rows
        self.known.update(zip(rows, tokens, strict=True))


@dataclass
class Load:
    """A load lease as its owner sees it."""

    answer: LoadAnswer
    owner: int
    conversation: Conversation
    from_token: int


@dataclass
class Store:
    """A store lease as its owner sees it."""

    answer: StoreAnswer
    owner: int
    rows: list[Row]


class CacheMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(
        num_slots=st.sampled_from([1, 3, 5, 12]),
        num_extents=st.sampled_from([0, 3, 8, 20]),
        max_sessions=st.sampled_from([2, 100]),
        max_leases=st.sampled_from([3, 100]),
        ttl_ns=st.sampled_from([None, 50]),
    )
    def start(self, num_slots, num_extents, max_sessions, max_leases, ttl_ns) -> None:
        limits = Limits(num_slots, num_extents, ttl_ns, max_sessions, max_leases)
        self.world = CacheWorld(limits)
        self.conversations = {key: Conversation() for key in KEYS}
        self.loads: list[Load] = []
        self.stores: list[Store] = []

    # --------------------------------------------------------------------------------------- turns

    @rule(key=st.sampled_from(KEYS), owner=st.sampled_from(OWNERS), skip=st.integers(0, 20))
    def prepare_load(self, key, owner, skip) -> None:
        conversation = self.conversations[key]
        # rows before from_token are known only where they follow from the tokens alone
        from_token = 0 if conversation.discarded else min(skip, len(conversation.tokens))
        snapshot = replace(conversation, tokens=list(conversation.tokens))
        try:
            answer = self.world.engine.prepare_load(
                key, to_bytes(conversation.tokens), from_token, owner, self.world.now_ns
            )
        except TooManyLeasesError:
            answer = LoadAnswer(Lookup.MISS, miss_reason="bound")
        if answer.lookup is Lookup.MISS:
            assert answer.miss_reason, "a miss has a reason"
        else:
            self.loads.append(Load(answer, owner, snapshot, from_token))
        self.world.pump()

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), at_deadline=st.booleans())
    def finish_load(self, data, at_deadline) -> None:
        engine = self.world.engine
        load = data.draw(st.sampled_from(self.loads))
        answer = load.answer
        if answer.lookup is Lookup.PENDING:
            if engine.lease_state(answer.lease_id) is LeaseState.PENDING and not at_deadline:
                return
            answer = engine.settle_load(answer.lease_id)
        self.loads.remove(load)
        if answer.lookup is Lookup.HIT:
            self._check_rows(load, answer)
            engine.complete_load(answer.lease_id, load.owner, self.world.now_ns)
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
        owner=st.sampled_from(OWNERS),
        is_quiet=st.booleans(),
    )
    def turn(self, key, new_tokens, owner, is_quiet) -> None:
        """A whole turn, without anything in between: load all there is, compute, store."""
        engine, conversation = self.world.engine, self.conversations[key]
        rows: list[Row] = []
        more = True
        while more:
            token_ids, now_ns = to_bytes(conversation.tokens), self.world.now_ns
            try:
                answer = engine.prepare_load(key, token_ids, len(rows), owner, now_ns)
            except TooManyLeasesError:
                break
            self.world.pump()
            if answer.lookup is Lookup.PENDING:
                self.world.quiesce()
                answer = engine.settle_load(answer.lease_id)
            if answer.lookup is Lookup.MISS:
                break
            rows = self._check_rows(Load(answer, owner, conversation, len(rows)), answer)
            conversation.replace(
                conversation.tokens, compute(rows, conversation.tokens[len(rows) :])
            )
            engine.complete_load(answer.lease_id, owner, now_ns)
            self.world.pump()
            more = answer.more
        if conversation.discarded and len(rows) < self._num_stored(key):
            return  # what is stored was computed before the discard; computing it anew would differ
        tokens = conversation.tokens + new_tokens
        rows = compute(rows, tokens[len(rows) :])
        conversation.replace(tokens, rows)
        self._store_all(key, owner)
        if is_quiet:
            self.world.quiesce()

    def _store_all(self, key: SessionKey, owner: int) -> None:
        engine, conversation, now_ns = self.world.engine, self.conversations[key], self.world.now_ns
        more, from_token = True, 0
        while more:
            token_ids = to_bytes(conversation.tokens)
            try:
                answer = engine.prepare_store(key, token_ids, from_token, owner, now_ns)
            except TooManyLeasesError:
                return
            if answer.lease_id:
                for block in answer.blocks:
                    end = block.token_offset + block.num_tokens
                    self.world.slots[block.slot_id] = conversation.rows[block.token_offset : end]
                stored = engine.complete_store(answer.lease_id, owner, True, now_ns)
                assert stored in (0, answer.end_token)
            assert answer.end_token > from_token or not answer.more, "asking again gets further"
            more, from_token = answer.more, answer.end_token
            self.world.pump()

    @rule(
        key=st.sampled_from(KEYS),
        new_tokens=TOKENS,
        owner=st.sampled_from(OWNERS),
        held_from=st.sampled_from(["start", "stored", "stored", "end"]),
    )
    def prepare_store(self, key, new_tokens, owner, held_from) -> None:
        conversation = self.conversations[key]
        num_stored = self._recompute_lost(key)
        rows = compute(conversation.rows, new_tokens)
        conversation.replace(conversation.tokens + new_tokens, rows)
        num_tokens = len(conversation.tokens)
        from_token = {"start": 0, "stored": min(num_stored, num_tokens), "end": num_tokens}[
            held_from
        ]
        try:
            answer = self.world.engine.prepare_store(
                key, to_bytes(conversation.tokens), from_token, owner, self.world.now_ns
            )
        except TooManyLeasesError:
            return
        assert bool(answer.lease_id) == bool(answer.blocks), "a lease has slots"
        for block in answer.blocks:
            rows = conversation.rows[block.token_offset : block.token_offset + block.num_tokens]
            assert block.token_offset >= from_token, "the engine is asked for KV it holds"
            self.world.slots[block.slot_id] = rows
        if answer.lease_id:
            self.stores.append(Store(answer, owner, list(conversation.rows)))
        self.world.pump()

    @rule(key=st.sampled_from(KEYS), kept=st.integers(0, 30))
    def regenerate(self, key, kept) -> None:
        """Go back to a point in the conversation; the next turn goes on from there."""
        conversation = self.conversations[key]
        if not conversation.discarded:
            conversation.replace(conversation.tokens[:kept], conversation.rows[:kept])

    def _recompute_lost(self, key: SessionKey) -> int:
        """After a discard, rows that kvd has lost are computed anew, on top of those it has.

        Returns the number of tokens kvd has stored.
        """
        conversation = self.conversations[key]
        num_kept = self._num_stored(key)
        if conversation.discarded and num_kept < len(conversation.rows):
            rows = compute(conversation.rows[:num_kept], conversation.tokens[num_kept:])
            conversation.replace(conversation.tokens, rows)
        return num_kept

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def complete_store(self, data, success) -> None:
        store = data.draw(st.sampled_from(self.stores))
        self.stores.remove(store)
        for block in store.answer.blocks:
            rows = store.rows[block.token_offset : block.token_offset + block.num_tokens]
            assert self.world.slots[block.slot_id] == rows, "a leased slot is nobody else's"
        self.world.engine.complete_store(
            store.answer.lease_id, store.owner, success, self.world.now_ns
        )
        self.world.pump()

    @rule(source=st.sampled_from(KEYS), fork=st.sampled_from(KEYS), at=st.integers(0, 30))
    def fork(self, source, fork, at) -> None:
        """Start a session over with the first tokens of another one."""
        if self.loads or self.stores:
            return
        if self._stored(fork):
            self.world.engine.flush(fork, False, self.world.now_ns)
        tokens = self.conversations[source].tokens[:at]
        self.conversations[fork].replace(tokens, compute([], tokens))
        self.world.pump()

    @rule(key=st.sampled_from(KEYS), start=st.integers(0, 20), length=st.integers(1, 9))
    def discard(self, key, start, length) -> None:
        conversation = self.conversations[key]
        self._recompute_lost(key)
        num_tokens = len(conversation.tokens)
        if start + length > num_tokens or self.stores:
            return
        self.world.engine.discard(
            key, to_bytes(conversation.tokens), [(start, start + length)], self.world.now_ns
        )
        conversation.discarded = True
        tokens = conversation.tokens[:start] + conversation.tokens[start + length :]
        rows = conversation.rows[:start] + conversation.rows[start + length :]
        conversation.replace(tokens, rows)
        self._recompute_lost(key)
        self.world.pump()

    # ----------------------------------------------------------------------------------- operators

    def _num_stored(self, key: SessionKey) -> int:
        info = self.world.engine.session_info(key)
        return info.num_tokens if info else 0

    def _stored(self, key: SessionKey) -> bool:
        return self._num_stored(key) > 0

    @rule(key=st.sampled_from(KEYS), what=st.sampled_from(["pin", "unpin", "end", "ttl", "never"]))
    def change(self, key, what) -> None:
        engine, now_ns = self.world.engine, self.world.now_ns
        if not self._stored(key):
            assert not engine.end_session(key, now_ns)
        elif what == "pin":
            engine.pin(key, now_ns)
        elif what == "unpin":
            engine.unpin(key, now_ns)
        elif what == "end":
            assert engine.end_session(key, now_ns)
        else:
            engine.set_ttl(key, 30 if what == "ttl" else TTL_NEVER_NS, now_ns)
        self.world.pump()

    @rule(key=st.sampled_from([None, *KEYS]), dry_run=st.sampled_from([True, True, False]))
    def flush(self, key, dry_run) -> None:
        engine = self.world.engine
        if key is None or self._stored(key):
            before = engine.stats()
            answer = engine.flush(key, dry_run, self.world.now_ns)
            assert (engine.stats() == before) or not dry_run, "a dry run changes nothing"
            assert answer.num_sessions + len(answer.skipped_leased) <= max(1, before.num_sessions)
        self.world.pump()

    @rule(owner=st.sampled_from(OWNERS), keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def push_queue(self, owner, keys) -> None:
        self.world.engine.push_queue(owner, [QueuedJob(key) for key in keys], self.world.now_ns)

    @precondition(lambda self: len(self.loads) + len(self.stores) > 2)
    @rule(owner=st.sampled_from(OWNERS))
    def owner_gone(self, owner) -> None:
        engine = self.world.engine
        engine.owner_gone(owner, self.world.now_ns)
        for load in [load for load in self.loads if load.owner == owner]:
            self.loads.remove(load)
            assert engine.lease_state(load.answer.lease_id) is LeaseState.LOST
        for store in [store for store in self.stores if store.owner == owner]:
            self.stores.remove(store)
            with pytest.raises(LeaseLostError):
                engine.complete_store(store.answer.lease_id, owner, True, self.world.now_ns)
        self.world.pump()

    # --------------------------------------------------------------------------------------- world

    @rule(elapsed_ns=st.sampled_from([1, 20, 100, 3_000_000_000]))
    def wait(self, elapsed_ns) -> None:
        self.world.now_ns += elapsed_ns
        self.world.engine.expire(self.world.now_ns)
        deadline_ns = self.world.engine.next_deadline_ns()
        assert deadline_ns is None or deadline_ns > self.world.now_ns, "what is due is done"
        self.world.pump()

    @precondition(lambda self: self.world.io)
    @rule(data=st.data(), failure=st.sampled_from([IoOutcome.OK] * 4 + [*IoOutcome]))
    def finish_io(self, data, failure) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.world.io)))
        self.world.finish_io(op_id, self._possible(op_id, failure))

    def _possible(self, op_id: int, outcome: IoOutcome) -> IoOutcome:
        impossible = IoOutcome.CORRUPT if op_id in self.world.written else IoOutcome.FULL
        return IoOutcome.TRANSIENT if outcome is impossible else outcome

    @rule(num_actions=st.integers(1, 20))
    def commit(self, num_actions) -> None:
        self.world.commit(num_actions)

    @rule(newest_first=st.booleans())
    def finish_all_io(self, newest_first) -> None:
        self.world.quiesce(newest_first=newest_first)

    @precondition(lambda self: self.world.index.blocks)
    @rule(num_committed=st.integers(0, 5))
    def crash(self, num_committed) -> None:
        self.world.index.commit(num_committed)
        self.loads, self.stores = [], []
        self.world.start()

    def teardown(self) -> None:
        """When everybody leaves and all is flushed, nothing is left."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for owner in OWNERS:
            world.engine.owner_gone(owner, world.now_ns)
        world.engine.flush(None, False, world.now_ns)
        world.pump()
        world.quiesce()
        stats = world.engine.stats()
        assert [tier.used_bytes for tier in stats.tiers] == [0, 0], "nothing leaks"
        assert not world.index.blocks
        assert not world.index.sessions


CacheMachine.TestCase.settings = settings(
    max_examples=80,
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
