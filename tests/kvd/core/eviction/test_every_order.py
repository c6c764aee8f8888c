"""Under any events every policy's order is complete, sorted by need, and yields to need."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.session_order import Guard
from kvd.core.records.tier import Tier
from shared.types.queue_delta import QueuedRequest, RunningRequest
from tests.kvd.core.eviction.sessions import Sessions, key_of
from tests.queue_changes import queue_change
from tests.sampled import examples

NAMES = "abcdefgh"
names = st.sampled_from(NAMES)
tiers = st.sampled_from(Tier)


class EveryOrder(RuleBasedStateMachine):
    """One policy under every event that can be reported to it, compared with sets of names."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def start(self, policy):
        self.sessions = Sessions(policy, capacity_bytes=300)
        self.sessions.placement.observe_size(100)
        self.policy = self.sessions.policy
        self.members = {tier: set() for tier in Tier}
        self.known = set()
        self.guarded = {}
        self.ended = set()
        self.num_requests = 0
        self.requests = {}  # number -> (name, whether it waits)

    @rule(name=names, tokens=st.integers(1, 100_000), seconds=st.integers(0, 1000))
    def use(self, name, tokens, seconds):
        self.sessions.now_ns += seconds * 10**9
        self.sessions.use(name)
        self.policy.on_resize(key_of(name), tokens)
        for members in self.members.values():
            members.add(name)
        self.known.add(name)
        self.ended.discard(name)

    @rule(name=names, tier=tiers)
    def enter(self, name, tier):
        self.policy.on_insert(key_of(name), tier)
        self.members[tier].add(name)
        self.known.add(name)

    @rule(name=names, tier=tiers)
    def leave(self, name, tier):
        self.policy.on_evict(key_of(name), tier)
        self.members[tier].discard(name)

    @rule(name=names)
    def remove(self, name):
        self.policy.on_remove(key_of(name))
        for names_of in (*self.members.values(), self.known, self.ended):
            names_of.discard(name)
        self.guarded.pop(name, None)

    @rule(name=names, guard=st.sampled_from(Guard))
    def guard(self, name, guard):
        self.policy.guard(key_of(name), guard)
        self.guarded.pop(name, None)
        if guard:
            self.guarded[name] = guard

    @rule(name=names)
    def end(self, name):
        self.policy.on_end(key_of(name))
        if name in self.known or name in self.guarded:
            self.ended.add(name)

    @rule(name=names)
    def supersede(self, name):
        self.policy.on_supersede(key_of(name))
        if name in self.known or name in self.guarded:
            self.ended.add(name)

    @rule(name=names, tools=st.lists(st.sampled_from(["bash", "read"]), min_size=1, max_size=2))
    def await_tools(self, name, tools):
        self.policy.on_await(key_of(name), tools, self.sessions.now_ns)

    @rule(name=names, priority=st.integers(0, 2))
    def submit(self, name, priority):
        self.num_requests += 1
        self.requests[self.num_requests] = (name, True)
        request = QueuedRequest(
            (-priority, float(self.num_requests), self.num_requests), key_of(name)
        )
        self._change(queue_change([request], interval_ns=10**9))

    @rule(data=st.data())
    def start_a_request(self, data):
        if waiting := [number for number, (_, waits) in self.requests.items() if waits]:
            number = data.draw(st.sampled_from(waiting))
            name = self.requests[number][0]
            self.requests[number] = (name, False)
            self._change(queue_change(running=[RunningRequest(number, key_of(name))]))

    @rule(data=st.data())
    def finish_a_request(self, data):
        if self.requests:
            number = data.draw(st.sampled_from(sorted(self.requests)))
            del self.requests[number]
            self._change(queue_change(left=[number]))

    @rule()
    def lose_the_engine(self):
        self.requests.clear()
        self.sessions.placement.forget_engine(1, self.sessions.now_ns)

    def _change(self, change):
        self.sessions.placement.change_queue(1, change, self.sessions.now_ns)

    @invariant()
    def orders_are_complete(self):
        for tier in Tier:
            victims = self.sessions.victims(tier)
            assert sorted(victims) == sorted(self.members[tier])
            ranked = {name for name in NAMES if self.policy.ranks(key_of(name), tier)}
            assert ranked == self.members[tier]
            self._check_bands(victims, tier)
        assert sorted(self.sessions.victims(None)) == sorted(self.known)

    def _check_bands(self, victims, tier):
        """Check the bands: guarded sessions last; before them the queue, tail first.

        Ended ones first.
        """
        guards = [self._guard(name, tier) for name in victims]
        assert guards == sorted(guards)
        for guard in Guard:
            part = "".join(name for name in victims if self._guard(name, tier) is guard)
            kept = [name for name in part if self._is_kept(name)]
            places = [self._place(name) for name in kept]
            assert places == sorted(places, reverse=True)
            if self.policy.name != "lookahead":  # whose window may end amid the queue
                assert part.endswith("".join(kept))
            first = {name for name in part if self._is_first(name, tier)}
            assert set(part[: len(first)]) == first

    def _guard(self, name, tier):
        """Return the guards that count in a tier: retention does not count in DRAM."""
        guard = self.guarded.get(name, Guard.NONE)
        return Guard.NONE if tier is Tier.DRAM and guard is Guard.RETAINED else guard

    def _place(self, name):
        return self.sessions.placement.queue.place(key_of(name))

    def _is_kept(self, name):
        """Return whether the policy keeps the session for a waiting turn."""
        place = self._place(name)
        if not self.policy.looks_ahead or place is None:
            return False
        queue = self.sessions.placement.queue
        return self.policy.name != "lookahead" or queue.num_ahead(place) < 3

    def _is_first(self, name, tier):
        if self._is_kept(name):
            return False
        if self.policy.looks_ahead and self.sessions.placement.queue.is_running(key_of(name)):
            return tier is Tier.DRAM
        return name in self.ended

    @rule(name=names, tier=tiers)
    def give_way(self, name, tier):
        """Check that a session's victims go before it in the order, and are not needed sooner."""
        victims = self.sessions.victims(tier)
        colder = self.sessions.victims(tier, giving_way_to=name)
        assert name not in colder
        assert [v for v in victims if v in colder] == list(colder)
        if name in victims and not self._guard(name, tier):
            assert colder == victims[: victims.index(name)]
        for victim in filter(self._is_kept, colder):
            assert self._is_kept(name)
            assert self._place(victim) > self._place(name)

    @rule()
    def return_(self):
        """Check that only idle sessions on SSD, and not in DRAM, are read before they return."""
        for key in self.policy.returning(self.sessions.now_ns):
            assert self.policy.ranks(key, Tier.SSD)
            assert not self.policy.ranks(key, Tier.DRAM)
            assert not self.sessions.placement.is_busy(key)
            assert key.session_id not in self.ended


TestEveryOrder = EveryOrder.TestCase
TestEveryOrder.settings = settings(
    max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck)
)
