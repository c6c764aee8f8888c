"""Under random queues and sessions the placement knows busy sessions, and ranks each once.

A model keeps every engine's requests as plain lists; the placement's results are compared with
those computed from the lists.
"""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.session_order import Guard
from kvd.core.eviction.session_placement import MOST_LATE, SessionPlacement
from kvd.core.records.tier import Tier
from shared.types.queue_delta import (
    QueuedRequest,
    RunningRequest,
    running_digest,
    update_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change
from tests.sampled import examples

SESSIONS = [SessionKey("a", "m", f"s{number}") for number in range(7)]
ENGINES = [1, 2, 3]
WHOLE_QUEUE = {"lookahead_queue", "predictive"}
KEYS = st.sampled_from(SESSIONS)
ENGINE_IDS = st.sampled_from(ENGINES)
INTERVALS = st.sampled_from([0, 0, 10, 70])
PRIORITIES = st.integers(-1, 1)
TAGS = st.sampled_from([0.0, 1.0, 2.5])


@dataclass
class Requests:
    """One engine's requests, as the engine has them."""

    waiting: dict[int, QueuedRequest] = field(default_factory=dict)  # requests by number
    running: dict[int, SessionKey] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        """Compute the digest of all requests anew."""
        digest = 0
        for request in self.waiting.values():
            digest = update_digest(digest, added=waiting_digest(request.rank, request.key))
        for number, key in self.running.items():
            digest = update_digest(digest, added=running_digest(number, key))
        return digest


class PlacementMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        capacity=st.sampled_from([0, 10, 1000]),
        has_ssd=st.booleans(),
    )
    def start(self, name, capacity, has_ssd) -> None:
        self.name = name
        self.has_ssd = has_ssd
        self.placement = SessionPlacement(POLICIES[name], lambda: capacity, has_ssd=has_ssd)
        self.engines = {engine_id: Requests() for engine_id in ENGINES}
        self.now_ns = 0
        self.next_number = 0
        self.ranked = {tier: set() for tier in Tier}
        self.guarded = {}
        self.opened = set()  # may have blocks on SSD that have to be read

    # --------------------------------------------------------------------------------------- queue

    @rule(engine_id=ENGINE_IDS, data=st.data(), interval_ns=INTERVALS)
    def change(self, engine_id, data, interval_ns) -> None:
        """Let some requests join, start, leave or change their ranks: all in one change."""
        requests = self.engines[engine_id]
        before = self._queued()
        left = data.draw(_some_of([*requests.waiting, *requests.running]), "left")
        numbers = [number for number in requests.waiting if number not in left]
        started = data.draw(_some_of(numbers), "started")
        moved = data.draw(_some_of([n for n in numbers if n not in started]), "moved")
        joined = data.draw(st.lists(KEYS, max_size=3), "joined")
        preempted = data.draw(
            _some_of([n for n in requests.running if n not in left]), "back from running"
        )
        change = queue_change(
            waiting=[
                *(self._job(data, key) for key in joined),
                *(self._job(data, requests.waiting[number].key, number) for number in moved),
                *(self._job(data, requests.running[number], number) for number in preempted),
            ],
            running=[RunningRequest(number, requests.waiting[number].key) for number in started],
            left=left,
            interval_ns=interval_ns,
        )
        for number in left:
            requests.waiting.pop(number, None)
            requests.running.pop(number, None)
        for number in started:
            requests.running[number] = requests.waiting.pop(number).key
        for request in change.waiting:
            requests.running.pop(request.rank[2], None)
            requests.waiting[request.rank[2]] = request
        digest = self.placement.change_queue(engine_id, change, self.now_ns)
        assert digest == requests.digest
        touched = {request.key for request in change.waiting} | {
            request.key for request in change.running
        }
        self._reopened(before, touched)

    @rule(
        engine_id=ENGINE_IDS, data=st.data(), keys=st.lists(KEYS, max_size=5), interval_ns=INTERVALS
    )
    def replace(self, engine_id, data, keys, interval_ns) -> None:
        """Send a full snapshot: what remains of the old queue may be at any place."""
        requests = self.engines[engine_id]
        before = self._queued()
        kept = data.draw(_some_of([*requests.waiting]), "kept")
        running = data.draw(_some_of([*requests.running]), "running")
        waiting = [self._job(data, key) for key in keys]
        waiting += [requests.waiting[number] for number in kept]
        requests.waiting = {request.rank[2]: request for request in waiting}
        requests.running = {number: requests.running[number] for number in running}
        runs = [RunningRequest(number, key) for number, key in requests.running.items()]
        digest = self.placement.replace_queue(
            engine_id, queue_change(waiting, runs, interval_ns=interval_ns), self.now_ns
        )
        assert digest == requests.digest
        self._reopened(
            before, {request.key for request in waiting} | {request.key for request in runs}
        )

    @rule(engine_id=ENGINE_IDS)
    def forget(self, engine_id) -> None:
        before = self._queued()
        self.engines[engine_id] = Requests()
        self.placement.forget_engine(engine_id, self.now_ns)
        self._reopened(before, set())

    # ------------------------------------------------------------------------------------ sessions

    @rule(key=KEYS, seconds=st.integers(0, 100))
    def touch(self, key, seconds) -> None:
        self.now_ns += seconds * 10**9
        self.placement.policy.on_access(key, self.now_ns)
        for tier in Tier:
            self.ranked[tier].add(key)

    @rule(key=KEYS, tier=st.sampled_from(Tier))
    def enter(self, key, tier) -> None:
        self.placement.policy.on_insert(key, tier)
        self.ranked[tier].add(key)

    @rule(key=KEYS, tier=st.sampled_from(Tier))
    def leave(self, key, tier) -> None:
        self.placement.policy.on_evict(key, tier)
        self.ranked[tier].discard(key)

    @rule(key=KEYS)
    def remove(self, key) -> None:
        self.placement.policy.on_remove(key)
        self.guarded.pop(key, None)
        for tier in Tier:
            self.ranked[tier].discard(key)

    @rule(key=KEYS, guard=st.sampled_from(Guard))
    def guard(self, key, guard) -> None:
        self.placement.policy.guard(key, guard)
        self.guarded[key] = guard

    @rule(key=KEYS, num_tokens=st.integers(1, 5000))
    def size(self, key, num_tokens) -> None:
        self.placement.policy.on_resize(key, num_tokens)
        self.placement.observe_size(num_tokens)

    @rule(key=KEYS)
    def end(self, key) -> None:
        self.placement.policy.on_end(key)

    @rule(key=KEYS, opens=st.booleans())
    def read(self, key, opens) -> None:
        """Put all of a session into DRAM, or remove some of it."""
        if opens:
            self.placement.prefetching.reopen(key)
            self.opened.add(key)
        else:
            self.placement.prefetching.settle(key)
            self.opened.discard(key)

    @rule(key=KEYS)
    def load(self, key) -> None:
        """Load a session: its turn may run before or after that is reported."""
        self.placement.on_load(key)
        running = {key for requests in self.engines.values() for key in requests.running.values()}
        assert self.placement.is_released(key) == (key in running)

    # -------------------------------------------------------------------------------------- asking

    @rule(tier=st.sampled_from(Tier), key=KEYS)
    def give_way(self, tier, key) -> None:
        """Check that the sessions that give way to another are a part of all that can, in order."""
        order = list(self.placement.policy.victims(tier, self.now_ns))
        colder = list(self.placement.policy.victims(tier, self.now_ns, giving_way_to=key))
        assert key not in colder
        assert colder == [other for other in order if other in colder]
        if self.name in WHOLE_QUEUE and key in self._queued():
            place = self.placement.queue.place
            assert not [o for o in colder if place(o) is not None and place(o) < place(key)]

    @rule(window=st.integers(0, 8), late=st.sets(KEYS))
    def pick(self, window, late) -> None:
        """Compare with a plain search: the first in time of those in the window, else the first."""
        found = self.placement.prefetching.pick(window, lambda key, _: key not in late)
        requests = list(self.placement.queue)
        first_at = {key: requests.index(key) for key in self._queued() & self.opened}
        order = [k for k in sorted(first_at, key=first_at.get) if first_at[k] < window][:MOST_LATE]
        in_time = [key for key in order if key not in late]
        assert found == next(iter(in_time or order), None)

    @rule()
    def return_soon(self) -> None:
        """Check that only idle sessions on SSD, and not in DRAM, are read before they return."""
        returning = list(self.placement.policy.returning(self.now_ns))
        assert len(set(returning)) == len(returning)
        for key in returning:
            assert key in self.ranked[Tier.SSD]
            assert key not in self.ranked[Tier.DRAM]
            assert not self.placement.is_busy(key)
        assert not returning or self.placement.policy.looks_ahead

    # ----------------------------------------------------------------------------------- invariants

    @invariant()
    def the_queue_is_known(self) -> None:
        """Check each engine's order; a session is busy while its turn waits or runs."""
        if not hasattr(self, "placement"):
            return
        queue = self.placement.queue
        queue.check()
        running = {key for requests in self.engines.values() for key in requests.running.values()}
        for key in SESSIONS:
            assert queue.is_queued(key) == (key in self._queued())
            assert queue.is_running(key) == (key in running)
            assert self.placement.is_busy(key) == (key in self._queued() | running)
            assert key in running or not self.placement.is_released(key)
        assert self.placement.queue.num_sessions_running == len(running)
        assert self.placement.has_busy == bool(self._queued() | running)
        assert len(self.placement.prefetching) == len(self.opened & self._queued())
        assert len(queue) == sum(len(requests.waiting) for requests in self.engines.values())

    @invariant()
    def each_is_ranked_once(self) -> None:
        """Check each tier's order: guarded sessions after all others, queued after idle ones."""
        if not hasattr(self, "placement"):
            return
        policy = self.placement.policy
        for tier in (None, *Tier):
            order = list(self.placement.policy.victims(tier, self.now_ns))
            ranked = set.union(*self.ranked.values()) if tier is None else self.ranked[tier]
            if tier is not None:
                assert set(order) == ranked
                assert all(policy.ranks(key, tier) == (key in ranked) for key in SESSIONS)
            assert len(set(order)) == len(order)
            assert set(order) >= ranked, "who has bytes somewhere can be dropped"
            guards = [self.guarded.get(key, Guard.NONE) for key in order]
            if tier is Tier.DRAM and self.has_ssd:
                guards = [guard is Guard.PINNED for guard in guards]
            assert guards == sorted(guards), (order, self.guarded)

    # -------------------------------------------------------------------------------------- inside

    def _job(self, data, key, number=None) -> QueuedRequest:
        if number is None:
            number, self.next_number = self.next_number, self.next_number + 1
        rank = (data.draw(PRIORITIES, "priority"), data.draw(TAGS, "tag"), number)
        return QueuedRequest(rank, key, 0)

    def _queued(self) -> set[SessionKey]:
        return {
            request.key
            for requests in self.engines.values()
            for request in requests.waiting.values()
        }

    def _reopened(self, before, touched) -> None:
        """Check the changed sessions: those that begin to wait, not those that left, others

        maybe. ¶ A request at an unchanged place, or another one of a waiting session, is no change.
        """
        queued, order = self._queued(), self.placement.prefetching
        self.opened = (self.opened & queued) | (queued - before)
        for key in before & queued:
            if key in touched:
                order.reopen(key)
                self.opened.add(key)
            elif key not in self.opened:
                order.settle(key)


def _some_of(numbers):
    return st.lists(st.sampled_from(numbers), unique=True) if numbers else st.just([])


PlacementMachine.TestCase.settings = settings(
    max_examples=examples(150),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSessionPlacement = PlacementMachine.TestCase
