"""After any discards, grafts, compactions, evictions and losses each loaded row is the context's.

Engines here name the lineage of what they load and store, and may continue with rows of their own
that kvd has lost, or store them after a discard that kvd has not received. Before the first discard
or graft a row must be the one that a fresh computation gives; behind it, one that some engine has
had for this very context, after these very discards and grafts, in this very place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvd.core.records.records import LoadAnswer, StoreAnswer
from kvd.core.records.tier import Admission, Tier
from kvd.core.state.limits import Limits
from shared.types.graft_source import GraftSource
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE, Lineage
from shared.types.session_key import SessionKey
from tests.property.cache_world import LAYOUT, MODEL, CacheWorld, Row, compute, to_bytes

KEYS = [SessionKey("a", MODEL, name) for name in "xyz"]
ENGINE_ID = 1
REST_NS = 20
LATER_NS = 2_000_000_000  # a compaction that was given up is tried again after this time
PHRASE = st.lists(st.integers(0, 1), min_size=1, max_size=9)


@dataclass
class Context:
    """A session as its engine has it."""

    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    lineage: Lineage = WHOLE


class DiscardMachine(RuleBasedStateMachine):
    """See the module docstring."""

    layout = LAYOUT

    @initialize(
        num_slots=st.sampled_from([6, 12, 30]),
        num_extents=st.sampled_from([0, 10, 100]),
        admission=st.sampled_from(Admission),
        max_waste=st.sampled_from([0.2, 0.2, 0.5, 1]),
    )
    def start(self, num_slots, num_extents, admission, max_waste) -> None:
        limits = Limits(
            num_slots,
            num_extents,
            admission=admission,
            write_back_delay_ns=30,
            max_waste=max_waste,
            compact_rest_ns=REST_NS,
        )
        self.world = CacheWorld(limits, layout=self.layout)
        self.contexts = {key: Context() for key in KEYS}
        self.had: set[tuple[bytes, tuple[int, ...], Row]] = set()

    # -------------------------------------------------------------------------------------- engine

    @rule(key=st.sampled_from(KEYS), phrase=PHRASE, has_rows=st.booleans())
    def turn(self, key, phrase, has_rows) -> None:
        """Load, unless the engine still has all rows; compute the rest; store."""
        context = self.contexts[key]
        rows = context.rows if has_rows else self._load(key)
        tokens = context.tokens + phrase
        self._know(key, Context(tokens, compute(rows, tokens[len(rows) :]), context.lineage))
        self._store(key)

    @rule(key=st.sampled_from(KEYS))
    def load(self, key) -> None:
        self._load(key)

    @rule(
        key=st.sampled_from(KEYS),
        start=st.integers(0, 12),
        length=st.integers(1, 9),
        is_heard=st.booleans(),
    )
    def discard(self, key, start, length, is_heard) -> None:
        if start + length <= len(self.contexts[key].tokens):
            self._discard(key, [(start, start + length)], is_heard=is_heard)

    @rule(key=st.sampled_from(KEYS), start=st.integers(0, 5), step=st.integers(2, 4))
    def discard_scattered(self, key, start, step) -> None:
        num_tokens = len(self.contexts[key].tokens)
        ranges = [(at, at + 1) for at in range(start, num_tokens, step)]
        if ranges:
            self._discard(key, ranges, is_heard=True)

    @rule(
        key=st.sampled_from(KEYS),
        source=st.sampled_from(KEYS),
        seam=st.integers(1, 12),
        phrase=PHRASE,
        start=st.integers(0, 12),
        length=st.integers(1, 20),
        is_heard=st.booleans(),
        num_steps=st.integers(0, 12),
    )
    def graft(self, key, source, seam, phrase, start, length, is_heard, num_steps) -> None:
        """Continue a session behind some of its tokens with new ones, then with another one's."""
        has, given = self.contexts[key], self.contexts[source]
        end = min(start + length, len(given.tokens))
        if key == source or start >= end:
            return
        if has.lineage.is_whole:
            self._know(key, Context(has.tokens[:seam], has.rows[:seam], WHOLE))
        self.turn(key, phrase, has_rows=False)
        if is_heard:
            self.rest(num_steps, REST_NS)
            self._graft_heard(key, source, start, end)
        has, given = self.contexts[key], self.contexts[source]
        before, theirs = to_bytes(has.tokens), to_bytes(given.tokens)
        tokens, rows = has.tokens + given.tokens[start:end], has.rows + given.rows[start:end]
        origin = GraftSource(source, theirs, given.lineage, start, end)
        lineage = origin.lineage_after(before, has.lineage)
        self._know(key, Context(tokens, rows, lineage))
        self._inherit(has, range(len(has.tokens)), key, 0)
        self._inherit(given, range(start, end), key, len(has.tokens))
        self._load(key)

    def _graft_heard(self, key, source, start, end) -> None:
        """Report a graft to kvd; a repeated report changes nothing."""
        has, given, engine = self.contexts[key], self.contexts[source], self.world.engine
        before, theirs = to_bytes(has.tokens), to_bytes(given.tokens)
        origin = GraftSource(source, theirs, given.lineage, start, end)
        num_found = engine.sessions.graft(key, before, has.lineage, origin)
        engine.check()
        assert 0 <= num_found <= end - start
        info = engine.inspection.info(key)
        assert not num_found or info.num_tokens == len(has.tokens) + num_found
        assert engine.sessions.graft(key, before, has.lineage, origin) == num_found
        self.world.pump()

    @rule(key=st.sampled_from(KEYS), phrase=PHRASE, num_steps=st.integers(0, 12))
    def thin_out(self, key, phrase, num_steps) -> None:
        """Discard every other token of a session of some blocks, and leave it alone."""
        self.turn(key, phrase * 2, has_rows=True)
        self.discard_scattered(key, 0, 2)
        self.finish()
        self.rest(num_steps, REST_NS)

    @rule(source=st.sampled_from(KEYS), fork=st.sampled_from(KEYS), keeps_lineage=st.booleans())
    def fork(self, source, fork, keeps_lineage) -> None:
        """Begin another session with the same tokens, with its discards or without any."""
        if self.world.engine.inspection.info(fork):
            self.world.engine.sessions.flush(fork, dry_run=False)
        of_source = self.contexts[source]
        lineage = of_source.lineage if keeps_lineage else WHOLE
        tokens = list(of_source.tokens)
        self._know(fork, Context(tokens, compute([], tokens), lineage))
        self.world.pump()
        self._load(fork)

    @rule(
        key=st.sampled_from(KEYS),
        fork=st.sampled_from(KEYS),
        phrase=PHRASE,
        start=st.integers(0, 9),
        has_rows=st.booleans(),
    )
    def discard_unheard(self, key, fork, phrase, start, has_rows) -> None:
        """Truncate a session while kvd is away; then load it, and report another discard."""
        self.turn(key, phrase * 2, has_rows=True)
        self.discard(key, start, 2, is_heard=False)
        self.turn(key, phrase, has_rows)
        self.fork(key, fork, keeps_lineage=False)

    @rule(
        key=st.sampled_from(KEYS),
        phrase=PHRASE,
        start=st.integers(0, 9),
        num_times=st.integers(0, 2),
        is_restarted=st.booleans(),
        goes_back=st.booleans(),
    )
    def retry(self, key, phrase, start, num_times, is_restarted, goes_back) -> None:
        """Report a discard again after more has been stored, or after its context has come back."""
        self.turn(key, phrase * 2, has_rows=True)
        before = self.contexts[key]
        if start + 2 >= len(before.tokens):
            return
        self._discard(key, [(start, start + 2)], is_heard=True)
        self.turn(key, phrase, has_rows=True)
        if is_restarted:
            self.kill(9, keep_dram=True)
        after, num_found = self.contexts[key], len(self._load(key))
        for _ in range(num_times):
            self.contexts[key] = before
            self._discard(key, [(start, start + 2)], is_heard=True)
            self.contexts[key] = after
            assert len(self._load(key)) >= num_found, "it is left alone, or brought to there"
        if goes_back:
            self.contexts[key] = before
            self.turn(key, phrase, has_rows=False)

    # --------------------------------------------------------------------------------------- world

    @rule(num_steps=st.integers(0, 12), elapsed_ns=st.sampled_from([1, REST_NS, LATER_NS]))
    def rest(self, num_steps, elapsed_ns) -> None:
        """Let time pass; some active operations end."""
        world = self.world
        world.now_ns += elapsed_ns
        world.engine.expire()
        world.pump()
        for _ in range(num_steps):
            if world.io:
                world.finish_io(min(world.io))
            else:
                world.commit(1)

    @rule()
    def finish(self) -> None:
        self.world.quiesce()

    @rule()
    def empty_dram(self) -> None:
        if self.world.engine.release_dram():
            self.world.engine.drop_slots()
            self.world.pump()
            self.world.engine.add_slots(self.world.limits.num_slots, 1)
        self.world.pump()

    @rule(num_committed=st.integers(0, 9), keep_dram=st.booleans())
    def kill(self, num_committed, keep_dram) -> None:
        self.world.index.commit(num_committed)
        self.world.start(keep_dram=keep_dram)

    def teardown(self) -> None:
        """Check that nothing is left when all is flushed."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.engine.sessions.flush(None, dry_run=False)
        world.pump()
        world.quiesce()
        stats = world.engine.inspection.stats()
        assert [tier.used_bytes for tier in stats.tiers] == [0, 0], "nothing leaks"
        assert not world.index.blocks
        assert not world.journal
        assert [tier.tier for tier in stats.tiers] == [Tier.DRAM, Tier.SSD]

    # -------------------------------------------------------------------------------------- inside

    def _know(self, key: SessionKey, context: Context) -> None:
        """Continue with another context."""
        self.contexts[key] = context
        digest, tokens = context.lineage.digest, tuple(context.tokens)
        self.had |= {(digest, tokens[: at + 1], row) for at, row in enumerate(context.rows)}

    def _discard(self, key: SessionKey, ranges: list[tuple[int, int]], *, is_heard: bool) -> None:
        context, token_ids = self.contexts[key], to_bytes(self.contexts[key].tokens)
        if is_heard:
            self.world.engine.sessions.discard(key, token_ids, ranges, lineage=context.lineage)
        dropped = {position for start, end in ranges for position in range(start, end)}
        kept = [at for at in range(len(context.tokens)) if at not in dropped]
        tokens, rows = ([of_all[at] for at in kept] for of_all in (context.tokens, context.rows))
        self._know(key, Context(tokens, rows, context.lineage.after(token_ids, ranges)))
        self._inherit(context, kept, key, 0)
        self.world.pump()

    def _inherit(self, old: Context, kept: Sequence[int], key: SessionKey, first: int) -> None:
        """Accept rows of kept tokens at the tokens' present places.

        Args:
            old: the context from which they were kept.
            kept: their places in it.
            key: the session they are in now.
            first: the place of the first of them in that.
        """
        new, tokens = self.contexts[key], tuple(old.tokens)
        places = {tokens[: at + 1]: first + index for index, at in enumerate(kept)}
        found = {(t, row) for d, t, row in self.had if d == old.lineage.digest and t in places}
        fresh = enumerate(compute([], old.tokens))
        found |= {(tokens[: at + 1], row) for at, row in fresh if old.lineage.is_clean(at + 1)}
        self.had |= {
            (new.lineage.digest, tuple(new.tokens[: places[t] + 1]), row)
            for t, row in found
            if t in places
        }

    def _load(self, key: SessionKey) -> list[Row]:
        """Load the stored tokens, and check them row by row."""
        engine, context, rows = self.world.engine, self.contexts[key], list[Row]()
        more = True
        while more:
            answer = engine.loads.prepare(
                key,
                to_bytes(context.tokens),
                len(rows),
                ENGINE_ID,
                lineage=context.lineage,
            )
            self.world.pump()
            if answer.lookup is Lookup.PENDING:
                self.world.quiesce()
                answer = engine.loads.settle(answer.lease_id)
            if answer.lookup is Lookup.MISS:
                break
            for span in answer.spans:
                rows += self.world.slots[span.slot_id][span.start :][: span.num_tokens]
            self._check_beside(context, answer)
            engine.loads.complete(answer.lease_id, ENGINE_ID)
            self.world.pump()
            more = answer.more
        self._check(context, rows)
        return rows

    def _check_beside(self, context: Context, answer: LoadAnswer) -> None:
        """Check what is granted beside the rows."""
        assert not answer.windows

    def _positions(self, tokens: list[int]) -> list[int]:
        """Return the token counts at which loads of these tokens should be able to end."""
        return []

    def _fill(self, answer: StoreAnswer, rows: list[Row]) -> None:
        for block in answer.blocks:
            self.world.slots[block.slot_id] = rows[block.token_offset :][: block.num_tokens]

    def _check(self, context: Context, rows: list[Row], first: int = 0) -> None:
        digest, tokens = context.lineage.digest, tuple(context.tokens)
        fresh = compute([], context.tokens)
        for at, row in enumerate(rows, first):
            if context.lineage.is_clean(at + 1):
                assert row == fresh[at], "nothing that was computed after a discard"
            else:
                assert (digest, tokens[: at + 1], row) in self.had, "a row of this very context"

    def _store(self, key: SessionKey) -> None:
        engine, context, more, from_token = self.world.engine, self.contexts[key], True, 0
        while more:
            answer = engine.stores.prepare(
                key,
                to_bytes(context.tokens),
                from_token,
                ENGINE_ID,
                lineage=context.lineage,
                load_ends=self._positions(context.tokens),
            )
            self._fill(answer, context.rows)
            if answer.lease_id:
                self.world.pump()
                engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
            more = answer.more and answer.end_token > from_token
            from_token = answer.end_token
            self.world.pump()


DiscardMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestDiscards = DiscardMachine.TestCase


@pytest.mark.long
class TestDiscardsLong(DiscardMachine.TestCase):
    """Runs the same machine at length."""

    settings = settings(DiscardMachine.TestCase.settings, max_examples=1000, stateful_step_count=60)
