"""Each tenant has what it was given, and nothing of what others do shows in it."""

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
    """A turn's place, or why there is none."""
    refusal = limits.refusal(tenant, tokens, opens, num_sessions, now_ns)
    return refusal or limits.enter(tenant, tokens, opens, now_ns)


def begun(limits, count, **turn):
    places = [begin(limits, **turn) for _ in range(count)]
    assert not [place for place in places if isinstance(place, Exception)]
    return places


def test_without_bounds_everybody_begins():
    """The defaults are none."""
    begun(limits(), 1000, tokens=1e9, opens="s", num_sessions=10**6)


def test_turns_a_minute():
    """A minute's worth at once, then one in each of its parts; the hint says when."""
    some = limits(TenantBounds(turns_per_minute=6))
    begun(some, 6)
    refusal = begin(some)
    assert (refusal.reason, refusal.retryable) == ("rate_limited", True)
    assert refusal.retry_after_s == pytest.approx(10.0)
    assert "6 turns per minute" in refusal.message
    assert refusal.remedy
    begun(some, 1, now_ns=int(refusal.retry_after_s * NS_PER_S))


def test_who_has_too_many_sessions_is_told_last():
    """It may delete one for the turn, which must then not be refused for its rate."""
    some = limits(TenantBounds(turns_per_minute=1, max_sessions=1))
    assert begin(some, opens="b", num_sessions=1).reason == "too_many_sessions"
    begun(some, 1)
    assert begin(some, opens="b", num_sessions=1).reason == "rate_limited"


def test_who_is_refused_comes_back_one_after_another():
    """A place is free for each when it comes, as far as a minute goes."""
    some = limits(TenantBounds(turns_per_minute=60))
    begun(some, 60)
    hints = [begin(some).retry_after_s for _ in range(60)]
    assert hints == pytest.approx([float(second) for second in range(1, 61)])
    for second in range(1, 61):
        begun(some, 1, now_ns=second * NS_PER_S)


def test_tokens_a_minute_count_what_was_computed():
    """A turn reserves what it may need and settles at its end; what it left is there again."""
    some = limits(TenantBounds(tokens_per_minute=600))
    (first,) = begun(some, 1, tokens=400.0)
    (second,) = begun(some, 1, tokens=400.0)  # any are left: it begins, and leaves a debt
    refusal = begin(some, tokens=10.0)
    assert refusal.reason == "rate_limited"
    assert refusal.retry_after_s == pytest.approx(20.1)  # -200 are left, 10 a second come
    some.leave(first, 0.0, 0)  # all of it was found in the cache: 200 are left
    begun(some, 1, tokens=100.0)
    some.leave(second, 500.0, 0)
    assert begin(some).reason == "rate_limited"
    begun(some, 1, now_ns=NS_PER_S // 10)


def test_an_endless_answer_does_not_reserve_more_than_a_minute_gives():
    """Else its tenant would wait for years."""
    some = limits(TenantBounds(tokens_per_minute=60))
    begun(some, 1, tokens=1e12)
    assert begin(some).retry_after_s == pytest.approx(1.0)


def test_turns_at_once():
    """A place is free when a turn has ended; the hint is by how long turns take."""
    some = limits(TenantBounds(max_turns=2), turn_s=0.5)
    first, _ = begun(some, 2)
    refusals = [begin(some), begin(some)]
    assert [refusal.reason for refusal in refusals] == ["too_many_turns"] * 2
    assert [refusal.retry_after_s for refusal in refusals] == [0.5, 1.0]
    some.leave(first, 0.0, 0)
    begun(some, 1)


def test_sessions_kept():
    """Those that are being opened count, once each; waiting does not help."""
    some = limits(TenantBounds(max_sessions=3))
    begun(some, 2, opens="new", num_sessions=2)
    refusal = begin(some, opens="other", num_sessions=2)
    assert (refusal.reason, refusal.retryable) == ("too_many_sessions", False)
    assert refusal.retry_after_s is None
    begun(some, 1, opens="", num_sessions=3)  # one of those that are there
    assert some.session_refusal("a", "fork", 2, 0) is not None
    assert some.session_refusal("b", "fork", 2, 0) is None


def test_one_tenant_does_not_wait_for_another():
    """However often one is refused: neither do others' hints grow, nor are they refused."""
    some = limits(TenantBounds(turns_per_minute=1, max_turns=5))
    begun(some, 1, tenant="flood")
    for _ in range(1000):
        assert begin(some, tenant="flood").reason == "rate_limited"
    begun(some, 1, tenant="other")
    assert begin(some, tenant="other").retry_after_s == pytest.approx(60.0)


def test_a_reload_changes_bounds_at_once():
    """Turns under way go on; a rate that was lifted and set again begins with a full minute."""
    some = limits(TenantBounds(turns_per_minute=2))
    begun(some, 2)
    some.set_bounds(TenantBounds(turns_per_minute=2), {"a": TenantBounds(max_turns=3)}, 0)
    begun(some, 1)
    assert begin(some).reason == "too_many_turns"
    some.set_bounds(TenantBounds(turns_per_minute=4), {}, NS_PER_S)
    begun(some, 4, now_ns=NS_PER_S)
    assert begin(some, now_ns=NS_PER_S).retry_after_s == pytest.approx(15.0)


def test_tenants_that_owe_nothing_are_forgotten():
    """However many names somebody thinks of."""
    some = limits(TenantBounds(turns_per_minute=60))
    for number in range(5 * SWEEP):
        now_ns = number * MINUTE_NS // 100
        (place,) = begun(some, 1, tenant=f"tenant-{number}", now_ns=now_ns)
        some.leave(place, 0.0, now_ns)
    assert len(some) <= 2 * SWEEP


class LimitsMachine(RuleBasedStateMachine):
    """Two tenants against plain lists of when turns began, and of those under way."""

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
            assert self.recent(tenant) <= 2 * 4  # a full minute's worth, and what came in since

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


def test_a_bucket_fills_by_the_minute_up_to_a_minutes_worth():
    """In proportion to the time that passes, which never goes back."""
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


def test_a_bucket_without_a_bound_is_never_empty():
    """Until it gets one: then it begins full, of one thing at least."""
    bucket = Bucket(None, 0)
    bucket.take(1e9, 0)
    assert (bucket.wait_s(1e9, 0), bucket.pace_s(1e9)) == (0.0, 0.0)
    bucket.set_rate(0.5, MINUTE_NS)
    assert (bucket.capacity, bucket.level(MINUTE_NS)) == (1.0, 1.0)
    bucket.set_rate(6.0, MINUTE_NS)
    assert bucket.level(MINUTE_NS) == 1.0, "it keeps what it had"
    bucket.set_rate(0.5, 2 * MINUTE_NS)
    assert bucket.level(2 * MINUTE_NS) == 1.0, "and no more than fits"


def test_a_session_that_two_turns_open_is_counted_until_both_have_ended():
    """Once, and it stands in nobody's way who opens the same."""
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
