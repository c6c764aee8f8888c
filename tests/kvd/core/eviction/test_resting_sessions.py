"""Restored sessions: ranked as if each had been added individually, at almost no cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction import session_order
from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.policy import EvictionPolicy
from kvd.core.eviction.session_order import Guard, RestingSessions
from kvd.core.records.tier import Tier
from tests.kvd.core.eviction.sessions import Sessions, key_of
from tests.sampled import examples

RESTED = "abcdefgh"
EVERYTHING = ((-1,), (1_000_000,))
steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "end", *Guard, "remove", "dram", "ssd", "left", "queue", "run"]),
        st.sampled_from(RESTED + "xy"),
    ),
    max_size=20,
)


def take(sessions: Sessions, what: str | Guard, name: str) -> None:
    """Let an event happen to a session."""
    policy, key = sessions.policy, key_of(name)
    match what:
        case "use":
            sessions.use(name)
            policy.on_resize(key, 100)
        case "end":
            policy.on_end(key)
        case Guard():
            policy.guard(key, what)
            policy.on_insert(key, Tier.SSD)
        case "remove":
            policy.on_remove(key)
        case "dram" | "ssd":
            policy.on_insert(key, Tier.DRAM if what == "dram" else Tier.SSD)
        case "left":
            policy.on_evict(key, Tier.SSD)
        case "queue":
            sessions.queue([name])
        case "run":
            sessions.queue([], [name])


def answers_of(sessions: Sessions) -> list[object]:
    """Return the policy's answers."""
    orders = [sessions.victims(tier) for tier in (None, *Tier)]
    below = [sessions.victims(tier, name) for tier in (None, *Tier) for name in RESTED + "x"]
    ranks = [sessions.policy.ranks(key_of(n), tier) for n in RESTED + "x" for tier in Tier]
    return [*orders, *below, ranks, list(sessions.policy.returning(sessions.now_ns))]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(deadline=None, max_examples=examples(60))
@given(steps)
def test_restored_sessions_rank_like_individually_added_ones(policy, steps):
    """Under every policy, in every tier, whatever happens to them and to others."""
    resting, each = Sessions(policy, capacity_bytes=300), Sessions(policy, capacity_bytes=300)
    resting.policy.on_restore([key_of(name) for name in RESTED])
    for name in RESTED:
        each.policy.on_insert(key_of(name), Tier.SSD)
    assert answers_of(resting) == answers_of(each)
    for what, name in steps:
        for sessions in resting, each:
            sessions.now_ns += 1_000_000_000
            take(sessions, what, name)
        assert answers_of(resting) == answers_of(each)


def test_reading_the_order_ranks_few_restored_sessions(monkeypatch):
    """However many there are: a look at the coldest ones asks for a few ranks."""
    sessions = Sessions("predictive")
    keys = [key_of(str(number)) for number in range(100_000)]
    sessions.policy.on_restore(keys)
    num_ranked = 0
    rank_of = EvictionPolicy._resting_rank

    def counted(policy, tier, use):
        nonlocal num_ranked
        num_ranked += 1
        return rank_of(policy, tier, use)

    monkeypatch.setattr(EvictionPolicy, "_resting_rank", counted)
    for tier in (None, Tier.SSD):
        victims = sessions.placement.policy.victims(tier, 0)
        assert [next(victims) for _ in range(3)] == keys[:3]
    assert list(sessions.policy.returning(0)) == []
    assert num_ranked < 100
    assert not sessions.policy._facts
    assert not sessions.policy._idle._histories


def test_used_sessions_are_skipped_by_the_page(monkeypatch):
    """The last one is found without reading each place before it."""
    monkeypatch.setattr(session_order, "RESTING_PAGE", 4)
    resting = RestingSessions()
    keys = [key_of(str(number)) for number in range(19)]
    resting.restore(keys, first_use=7)
    for key in keys[:18]:
        assert resting.wake(key) is not None
    assert resting.wake(keys[0]) is None
    assert resting._num_resting == [0, 0, 0, 0, 1]
    found = resting.between(*EVERYTHING, lambda use: (use,))
    assert list(found) == [((25,), keys[18])]
    assert (len(resting), keys[18] in resting, resting.use(keys[17])) == (1, True, None)


@given(st.integers(0, 20), st.integers(0, 25), st.integers(0, 25))
def test_any_part_of_the_order_can_be_read(num_sessions, coldest, warmest):
    """It lies between two ranks, whether or not a session has these."""
    resting = RestingSessions()
    keys = [key_of(str(number)) for number in range(num_sessions)]
    resting.restore(keys, first_use=1)
    found = resting.between((coldest,), (warmest,), lambda use: (use,))
    expected = [((use,), key) for use, key in enumerate(keys, 1) if coldest <= use < warmest]
    assert list(found) == expected


def test_restored_sessions_between_used_pages_are_found(monkeypatch):
    """Whole pages were used in between."""
    monkeypatch.setattr(session_order, "RESTING_PAGE", 4)
    resting = RestingSessions()
    keys = [key_of(str(number)) for number in range(20)]
    resting.restore(keys, first_use=1)
    for number in (*range(4), *range(8, 12), 13):
        resting.wake(keys[number])
    assert resting._num_resting == [0, 4, 0, 3, 4]
    found = [key for _, key in resting.between(*EVERYTHING, lambda use: (use,))]
    assert found == [*keys[4:8], keys[12], *keys[14:]]
