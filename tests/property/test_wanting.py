"""Loads that wait for what is fetched: each is told of the end, and none waits for ever."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvd.core.operations.wanting import ANSWER_NS, ASK_AGAIN_NS
from kvd.core.records.actions import SESSION_WANTED, Emit, FetchEnded
from shared.types.queue_delta import QueueChange, QueuedRequest
from tests.kvd.core.turns import ENGINE_ID, ONES, A, B, C, counter, new_world, store
from tests.sampled import examples

KEYS = (A, B, C)
SOME = st.sampled_from(KEYS)
RESULTS = ("fetched", "absent", "unanswered", "late")


class WantingMachine(RuleBasedStateMachine):
    """Turns come and wait, somebody answers or does not, sessions come and go, time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = new_world(wants_sessions=True)
        self.waiting: dict = {}  # since when, of sessions that a load waits for
        self.asked: dict = {}  # when a session was last asked for
        self.fetched: set = set()  # what loads have waited for: when it goes it is asked for anew
        self.num_ended = self.num_requests = 0

    @property
    def wanting(self):
        return self.world.engine.wanting

    def _happened(self) -> None:
        """Look at what the engine says; who is told that a fetch has ended asks again."""
        while True:
            self.world.pump()
            events, self.world.events = self.world.events, []
            for event in events:
                if isinstance(event, Emit) and event.name == SESSION_WANTED:
                    before = self.asked.get(event.key, -ASK_AGAIN_NS)
                    assert self.world.now_ns >= before + ASK_AGAIN_NS or event.key in self.fetched
                    self.asked[event.key] = self.world.now_ns
                    self.fetched.discard(event.key)
            if not any(isinstance(event, FetchEnded) for event in events):
                return
            for key in list(self.waiting):
                if not self.wanting.is_awaited(key, 4):
                    self._end(key)

    def _end(self, key) -> None:
        self.wanting.wait_ended(key, self.waiting.pop(key))
        self.num_ended += 1
        if key in self._stored():
            self.fetched.add(key)

    def _stored(self):
        return self.world.engine.inspection.keys()

    @rule(key=SOME, history=st.integers(0, 4))
    def queue(self, key, history) -> None:
        self.num_requests += 1
        request = QueuedRequest((0, 0.0, self.num_requests), key, history)
        self.world.engine.engines.change_queue(ENGINE_ID, QueueChange([request]))
        self._happened()

    @rule(key=SOME)
    def begin(self, key) -> None:
        is_stored = key in self._stored()
        if self.wanting.is_awaited(key, 4):
            assert not is_stored
            self.waiting.setdefault(key, self.world.now_ns)
        self._happened()

    @rule(key=SOME)
    def give_up(self, key) -> None:
        if key in self.waiting:
            self._end(key)
            assert not self.wanting.is_awaited(key, 4) or self.asked[key] == self.world.now_ns
        self._happened()

    @rule(key=SOME, is_coming=st.booleans())
    def answer(self, key, is_coming) -> None:
        self.wanting.answered(key, is_coming=is_coming)
        self._happened()
        assert is_coming or key not in self.waiting

    @rule(key=SOME)
    def come(self, key) -> None:
        store(self.world, key, ONES)
        self._happened()
        assert key not in self.waiting

    @rule(key=SOME)
    def go(self, key) -> None:
        if key in self._stored():
            self.world.engine.sessions.flush(key, dry_run=False)
        self._happened()

    @rule(ns=st.sampled_from([1, ANSWER_NS // 2, ANSWER_NS, ASK_AGAIN_NS]))
    def wait(self, ns) -> None:
        """Time passes; what is due then is done, as a timer of kvd's does it."""
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
    def who_waits_has_reason_to(self) -> None:
        """Whoever has none was told so; each wait is counted once."""
        for key in list(self.waiting):
            if not self.wanting.is_awaited(key, 4):
                self.world.pump()
                assert FetchEnded() in self.world.events
        self._happened()
        assert sum(counter(self.world, f"fetch_waits_{name}") for name in RESULTS) == self.num_ended


TestWanting = WantingMachine.TestCase
TestWanting.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
