"""Each tenant has its own limits, independent of other tenants."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference_svc.core.tenant_limits import MAX_RETRY_S, SWEEP, Bucket, TenantBounds, TenantLimits
from shared.types.units import NS_PER_S
from tests.sampled import examples

FREE = TenantBounds()
MINUTE_NS = 60 * NS_PER_S


def limits(default=FREE, turn_s=0.5, **named):
    return TenantLimits(default, named, lambda: turn_s)


def begin(limits, tenant="a", tokens=0.0, opens="", num_sessions=0, now_ns=0):
    """Take a turn's place, or return the error."""
    refusal = limits.refusal(tenant, tokens, opens, num_sessions, now_ns)
    return refusal or limits.enter(tenant, tokens, opens, now_ns)


def begin_turns(limits, count, **turn):
    places = [begin(limits, **turn) for _ in range(count)]
    assert not [place for place in places if isinstance(place, Exception)]
    return places


def test_without_limits_every_turn_begins():
    """There are none by default."""
    begin_turns(limits(), 1000, tokens=1e9, opens="s", num_sessions=10**6)


def test_turns_per_minute():
    """A minute's worth at once, then one per fraction of it; the hint gives the time."""
    some = limits(TenantBounds(turns_per_minute=6))
    begin_turns(some, 6)
    refusal = begin(some)
    assert (refusal.reason, refusal.retryable) == ("rate_limited", True)
    assert refusal.retry_after_s == pytest.approx(10.0)
    assert "6 turns per minute" in refusal.message
    assert refusal.remedy
    begin_turns(some, 1, now_ns=int(refusal.retry_after_s * NS_PER_S))


def test_the_limit_of_sessions_is_checked_last():
    """The client may delete a session for the turn, which must then not be refused for its rate."""
    some = limits(TenantBounds(turns_per_minute=1, max_sessions=1))
    assert begin(some, opens="b", num_sessions=1).reason == "too_many_sessions"
    begin_turns(some, 1)
    assert begin(some, opens="b", num_sessions=1).reason == "rate_limited"


def test_refused_clients_get_successive_times():
    """A place is free for each at its time, up to a minute ahead."""
    some = limits(TenantBounds(turns_per_minute=60))
    begin_turns(some, 60)
    hints = [begin(some).retry_after_s for _ in range(60)]
    assert hints == pytest.approx([float(second) for second in range(1, 61)])
    for second in range(1, 61):
        begin_turns(some, 1, now_ns=second * NS_PER_S)


def test_tokens_per_minute_count_computed_tokens():
    """A turn reserves its maximum and settles at its end; unused tokens are returned."""
    some = limits(TenantBounds(tokens_per_minute=600))
    (first,) = begin_turns(some, 1, tokens=400.0)
    (second,) = begin_turns(some, 1, tokens=400.0)  # some are left: it begins, and leaves a debt
    refusal = begin(some, tokens=10.0)
    assert refusal.reason == "rate_limited"
    assert refusal.retry_after_s == pytest.approx(20.1)  # -200 are left, 10 per second are added
    some.leave(first, 0.0, 0)  # all of it was found in the cache: 200 are left
    begin_turns(some, 1, tokens=100.0)
    some.leave(second, 500.0, 0)
    assert begin(some).reason == "rate_limited"
    begin_turns(some, 1, now_ns=NS_PER_S // 10)


def test_an_endless_answer_reserves_at_most_a_minutes_worth():
    """Otherwise its tenant would wait for years."""
    some = limits(TenantBounds(tokens_per_minute=60))
    begin_turns(some, 1, tokens=1e12)
    assert begin(some).retry_after_s == pytest.approx(1.0)


def test_simultaneous_turns():
    """A place is free when a turn has ended; the hint depends on the duration of turns."""
    some = limits(TenantBounds(max_turns=2), turn_s=0.5)
    first, _ = begin_turns(some, 2)
    refusals = [begin(some), begin(some)]
    assert [refusal.reason for refusal in refusals] == ["too_many_turns"] * 2
    assert [refusal.retry_after_s for refusal in refusals] == [0.5, 1.0]
    some.leave(first, 0.0, 0)
    begin_turns(some, 1)


def test_stored_sessions():
    """Those being opened count, once each; waiting does not help."""
    some = limits(TenantBounds(max_sessions=3))
    begin_turns(some, 2, opens="new", num_sessions=2)
    refusal = begin(some, opens="other", num_sessions=2)
    assert (refusal.reason, refusal.retryable) == ("too_many_sessions", False)
    assert refusal.retry_after_s is None
    begin_turns(some, 1, opens="", num_sessions=3)  # one of the existing ones
    assert some.session_refusal("a", "fork", 2, 0) is not None
    assert some.session_refusal("b", "fork", 2, 0) is None


def test_tenants_do_not_affect_each_other():
    """However often one is refused, others' hints do not grow, and they are not refused."""
    some = limits(TenantBounds(turns_per_minute=1, max_turns=5))
    begin_turns(some, 1, tenant="flood")
    for _ in range(1000):
        assert begin(some, tenant="flood").reason == "rate_limited"
    begin_turns(some, 1, tenant="other")
    assert begin(some, tenant="other").retry_after_s == pytest.approx(60.0)


def test_a_reload_changes_bounds_at_once():
    """Running turns continue; a rate that was removed and set again begins with a full minute."""
    some = limits(TenantBounds(turns_per_minute=2))
    begin_turns(some, 2)
    some.set_bounds(TenantBounds(turns_per_minute=2), {"a": TenantBounds(max_turns=3)}, 0)
    begin_turns(some, 1)
    assert begin(some).reason == "too_many_turns"
    some.set_bounds(TenantBounds(turns_per_minute=4), {}, NS_PER_S)
    begin_turns(some, 4, now_ns=NS_PER_S)
    assert begin(some, now_ns=NS_PER_S).retry_after_s == pytest.approx(15.0)


def test_tenants_without_debts_are_forgotten():
    """However many names clients invent."""
    some = limits(TenantBounds(turns_per_minute=60))
    for number in range(5 * SWEEP):
        now_ns = number * MINUTE_NS // 100
        (place,) = begin_turns(some, 1, tenant=f"tenant-{number}", now_ns=now_ns)
        some.leave(place, 0.0, now_ns)
    assert len(some) <= 2 * SWEEP


class LimitsMachine(RuleBasedStateMachine):
    """Compares two tenants with plain lists of turns' starts, and of running turns."""

    def __init__(self):
        super().__init__()
        self.bounds = TenantBounds(turns_per_minute=4, max_turns=3)
        self.limits = limits(self.bounds)
        self.now_ns = 0
        self.begun_ns = {"a": [], "b": []}
        self.places = {"a": [], "b": []}

    @rule(tenant=st.sampled_from("ab"))
    def begin(self, tenant):
        found = begin(self.limits, tenant, now_ns=self.now_ns)
        if isinstance(found, Exception):
            assert 0 < found.retry_after_s <= MAX_RETRY_S
            if found.reason == "too_many_turns":
                assert len(self.places[tenant]) == 3
            else:
                assert self.recent(tenant) >= 4
        else:
            self.places[tenant].append(found)
            self.begun_ns[tenant].append(self.now_ns)
            assert len(self.places[tenant]) <= 3
            assert self.recent(tenant) <= 2 * 4  # a full minute's worth, and what was added since

    @precondition(lambda self: any(self.places.values()))
    @rule(data=st.data())
    def leave(self, data):
        tenant = data.draw(st.sampled_from([t for t in "ab" if self.places[t]]))
        self.limits.leave(self.places[tenant].pop(), 0.0, self.now_ns)

    @rule(seconds=st.integers(0, 100))
    def wait(self, seconds):
        self.now_ns += seconds * NS_PER_S

    def recent(self, tenant):
        return sum(begun > self.now_ns - MINUTE_NS for begun in self.begun_ns[tenant])

    @invariant()
    def holds(self):
        self.limits.check()


TestLimitsMachine = LimitsMachine.TestCase
TestLimitsMachine.settings = settings(
    max_examples=examples(40), stateful_step_count=40, deadline=None
)


def test_a_bucket_fills_up_to_a_minutes_worth():
    """In proportion to the time, which never goes back."""
    bucket = Bucket(60.0, 0)
    bucket.take(60.0, 0)
    assert bucket.level(0) == 0.0
    assert bucket.level(NS_PER_S // 2) == 0.5
    assert bucket.level(30 * NS_PER_S) == 30.0
    assert bucket.level(29 * NS_PER_S) == 30.0
    assert bucket.level(30 * NS_PER_S) == 31.0, "time is counted from the last look on"
    assert bucket.level(1000 * NS_PER_S) == bucket.capacity == 60.0
    bucket.take(100.0, 1000 * NS_PER_S)
    assert bucket.level(1000 * NS_PER_S) == -40.0
    assert (bucket.wait_s(1.0, 1000 * NS_PER_S), bucket.pace_s(10.0)) == (41.0, 10.0)
    bucket.take(-500.0, 1000 * NS_PER_S)
    assert bucket.level(1000 * NS_PER_S) == 60.0, "what is given back is bounded, too"
    assert bucket.wait_s(90.0, 1000 * NS_PER_S) == 0.0


def test_a_bucket_without_a_limit_is_never_empty():
    """When it gets one it begins full, with at least one unit."""
    bucket = Bucket(None, 0)
    bucket.take(1e9, 0)
    assert (bucket.wait_s(1e9, 0), bucket.pace_s(1e9)) == (0.0, 0.0)
    bucket.set_rate(0.5, MINUTE_NS)
    assert (bucket.capacity, bucket.level(MINUTE_NS)) == (1.0, 1.0)
    bucket.set_rate(6.0, MINUTE_NS)
    assert bucket.level(MINUTE_NS) == 1.0, "it keeps what it had"
    bucket.set_rate(0.5, 2 * MINUTE_NS)
    assert bucket.level(2 * MINUTE_NS) == 1.0, "and no more than fits"


def test_a_session_opened_by_two_turns_counts_once():
    """Until both have ended; it does not prevent another turn from opening the same one."""
    some = limits(TenantBounds(max_sessions=1))
    some.begin_opening("a", "s", 0)
    some.begin_opening("a", "s", 0)
    assert some.session_refusal("a", "s", 0, 0) is None
    for _ in range(2):
        assert some.session_refusal("a", "other", 0, 0).reason == "too_many_sessions"
        some.end_opening("a", "s")
        some.check()
    assert some.session_refusal("a", "other", 0, 0) is None


def test_a_session_that_exists_is_not_being_opened():
    """Whoever has opened it may say so again, also when its tenant is forgotten."""
    some = limits(TenantBounds(max_sessions=1))
    begun_turn = begin(some, opens="s")
    some.begin_opening("a", "s", 0)
    some.opened("a", "s")
    assert some.session_refusal("a", "other", 0, 0) is None
    some.end_opening("a", "s")
    some.leave(begun_turn, 0.0, 0)
    some.opened("nobody", "s")
    some.end_opening("nobody", "s")
    assert some.session_refusal("a", "other", 0, 0) is None
    some.check()


def test_tenants_are_swept_when_there_are_twice_as_many_as_were_needed():
    """Those that hold or owe something are kept; the look is as seldom as that."""
    some = limits(TenantBounds(turns_per_minute=1))
    for number in range(SWEEP):
        begin(some, str(number))
    some.refusal("one more", 0.0, "", 0, MINUTE_NS - 1)
    assert len(some) == SWEEP + 1, "all of them have a turn under way"
    for number in range(2 * SWEEP - 1):
        some.refusal(f"x{number}", 0.0, "", 0, MINUTE_NS)
    assert len(some) == 3 * SWEEP
    some.refusal("last", 0.0, "", 0, MINUTE_NS)
    assert len(some) == SWEEP + 1
