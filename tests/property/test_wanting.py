"""Loads that wait for a fetch: each is notified of its end, and none waits for ever."""

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvd.core.operations.growing import Growth
from kvd.core.operations.wanting import ANSWER_NS, ASK_AGAIN_NS
from kvd.core.records.actions import SESSION_WANTED, Emit, FetchEnded
from kvd.core.records.errors import SessionChangedError
from shared.types.lineage import WHOLE
from shared.types.queue_delta import QueuedRequest
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    complete_store,
    counter,
    new_world,
    prepare_store,
    store,
)
from tests.property.cache_world import to_bytes
from tests.queue_changes import queue_change
from tests.sampled import examples

KEYS = (A, B, C)
SOME = st.sampled_from(KEYS)
HISTORY = st.sampled_from([0, 4, 7, 8, 12])
BLOCKS = ONES + TWOS + THREES
RESULTS = ("fetched", "absent", "unanswered", "late", "partly")


class WantingMachine(RuleBasedStateMachine):
    """Turns come and wait, a follower answers or does not, sessions come, grow and go."""

    def __init__(self) -> None:
        super().__init__()
        self.world = new_world(wants_sessions=True)
        # for each session that a load waits for: its history, and since when
        self.waiting: dict = {}
        # when a session was last requested, and how much of it was stored then
        self.asked: dict = {}
        self.leases: dict = {}  # active stores
        self.growths: dict = {}  # active imports that let their sessions grow
        # sessions that loads have waited for: when one is dropped it is requested anew
        self.fetched: set = set()
        self.num_ended = self.num_requests = 0

    @property
    def wanting(self):
        return self.world.engine.wanting

    def _happened(self) -> None:
        """Process the engine's events; a load that is notified of a fetch's end asks again."""
        while True:
            self.world.pump()
            events, self.world.events = self.world.events, []
            for event in events:
                if isinstance(event, Emit) and event.name == SESSION_WANTED:
                    before, there_before = self.asked.get(event.key, (-ASK_AGAIN_NS, 0))
                    there = int(event.fields["stored_tokens"])
                    is_again = self.world.now_ns >= before + ASK_AGAIN_NS
                    # a session that was nowhere has continued here
                    has_grown = there > there_before
                    assert is_again or has_grown or event.key in self.fetched
                    is_growing = self.world.engine.growing.is_growing(event.key)
                    is_first = event.key in self.fetched or event.key not in self.asked
                    assert is_first or not is_growing
                    assert there == 0 or int(event.fields["num_tokens"]) >= there + len(ONES)
                    assert there == 0 or event.key not in self.leases
                    self.asked[event.key] = self.world.now_ns, there
                    self.fetched.discard(event.key)
            if not any(isinstance(event, FetchEnded) for event in events):
                return
            for key in list(self.waiting):
                if not self._is_awaited(key):
                    self._end(key)

    def _is_awaited(self, key) -> bool:
        return self.wanting.is_awaited(key, self.waiting[key][0], inf)

    def _end(self, key) -> None:
        history, since_ns = self.waiting.pop(key)
        num_fetched = counter(self.world, "fetch_waits_fetched")
        self.wanting.wait_ended(key, history, since_ns)
        is_fetched = counter(self.world, "fetch_waits_fetched") > num_fetched
        self.num_ended += 1
        if not self._lacks(key, history):
            assert is_fetched
            self.fetched.add(key)
        elif key in self.asked:
            assert not is_fetched or self._num_stored(key) > self.asked[key][1]

    def _num_stored(self, key) -> int:
        info = self.world.engine.inspection.info(key)
        return info.num_tokens if info else 0

    def _lacks(self, key, history) -> bool:
        there = self._num_stored(key)
        return not there or history >= there + len(ONES)

    @rule(key=SOME, history=HISTORY)
    def queue(self, key, history) -> None:
        self.num_requests += 1
        request = QueuedRequest((0, 0.0, self.num_requests), key, history)
        self.world.engine.engines.change_queue(ENGINE_ID, queue_change([request]))
        self._happened()

    @rule(key=SOME, history=HISTORY)
    def begin(self, key, history) -> None:
        if key not in self.waiting and self.wanting.is_awaited(key, history, inf):
            assert self._lacks(key, history)
            self.waiting[key] = history, self.world.now_ns
        self._happened()

    @rule(key=SOME)
    def give_up(self, key) -> None:
        if key in self.waiting:
            history, _ = self.waiting[key]
            self._end(key)
            is_awaited = self.wanting.is_awaited(key, history, inf)
            assert not is_awaited or self.asked[key][0] == self.world.now_ns
        self._happened()

    @rule(key=SOME, is_coming=st.booleans())
    def answer(self, key, is_coming) -> None:
        self.wanting.on_answer(key, is_coming=is_coming)
        self._happened()
        assert is_coming or key not in self.waiting

    @rule(key=SOME, num_blocks=st.integers(1, 3))
    def come(self, key, num_blocks) -> None:
        """Let a session come, by a turn or a pull; loads wait on while more of it comes."""
        store(self.world, key, BLOCKS[: num_blocks * len(ONES)])
        self._happened()
        is_growing = self.world.engine.growing.is_growing(key)
        assert is_growing or not self._has_come(key) or key not in self.waiting

    @rule(key=SOME, num_blocks=st.integers(1, 3))
    def grow(self, key, num_blocks) -> None:
        """Let an import bring so many tokens of a session, or more."""
        source = key._replace(session_id=f"import-{key.session_id}")
        growth = self.growths.setdefault(key, Growth(key, source, WHOLE, len(BLOCKS)))
        store(self.world, source, BLOCKS[: num_blocks * len(ONES)])
        try:
            if self.world.engine.growing.grow(growth, to_bytes(BLOCKS)):
                assert self._num_stored(key) == self._num_stored(source)
        except SessionChangedError:
            self._end_growth(key, is_whole=False)
        self._happened()

    @rule(key=SOME, is_whole=st.booleans())
    def end_growth(self, key, is_whole) -> None:
        """End an import: no load waits for the session any more unless it is requested anew."""
        was_growing = self.world.engine.growing.is_growing(key)
        if key in self.growths:
            self._end_growth(key, is_whole=is_whole)
        self._happened()
        assert not (was_growing and self._has_come(key)) or key not in self.waiting

    def _has_come(self, key) -> bool:
        """Return whether more of the session is stored than when it was requested."""
        return key in self.asked and self._num_stored(key) > self.asked[key][1]

    def _end_growth(self, key, *, is_whole) -> None:
        growth = self.growths.pop(key)
        self.world.engine.growing.end(growth, is_whole=is_whole)
        self.world.engine.check()
        if self._num_stored(growth.source):
            self.world.engine.sessions.flush(growth.source, dry_run=False)

    @rule(key=SOME, num_blocks=st.integers(1, 3))
    def begin_store(self, key, num_blocks) -> None:
        if key not in self.leases:
            answer = prepare_store(self.world, key, BLOCKS[: num_blocks * len(ONES)])
            if answer.lease_id:
                self.leases[key] = answer
        self._happened()

    @rule(key=SOME, success=st.booleans())
    def complete(self, key, success) -> None:
        if key in self.leases:
            complete_store(self.world, self.leases.pop(key), success=success)
        self._happened()

    @rule(key=SOME)
    def go(self, key) -> None:
        if self._num_stored(key):
            self.world.engine.sessions.flush(key, dry_run=False)
        self._happened()

    @rule(key=SOME)
    def lose_the_end(self, key) -> None:
        session = self.world.engine._state.sessions.get(key)
        if session is not None:
            self.world.engine._state.cut(session, session.num_spans - 1, "evicted")
        self._happened()

    @rule(ns=st.sampled_from([1, ANSWER_NS // 2, ANSWER_NS, ASK_AGAIN_NS]))
    def wait(self, ns) -> None:
        """Let time pass; run what is due then, as a timer of kvd's does."""
        until_ns = self.world.now_ns + ns
        while (due_ns := self.world.engine.next_deadline_ns()) is not None and due_ns <= until_ns:
            self._pass(max(due_ns, self.world.now_ns))
            self.world.engine.expire()
            self._happened()
        self._pass(until_ns)

    def _pass(self, now_ns) -> None:
        self.world.now_ns = now_ns
        self.world.engine.advance(now_ns)

    @invariant()
    def waiting_loads_have_a_reason(self) -> None:
        """Check that loads wait only while a fetch may succeed; each wait is counted once."""
        for key in list(self.waiting):
            if not self._is_awaited(key):
                self.world.pump()
                assert FetchEnded() in self.world.events
        self._happened()
        assert sum(counter(self.world, f"fetch_waits_{name}") for name in RESULTS) == self.num_ended


TestWanting = WantingMachine.TestCase
TestWanting.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
