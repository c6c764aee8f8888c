"""What is learned of idle sessions: their classes, how they age, and when rates change."""

from itertools import pairwise

import pytest

from kvd.core.eviction.idle_sessions import (
    LEARNED_SHARE,
    LEAST_NEW,
    MANY_TURNS,
    MOST_AGED,
    MOST_NEW,
    TURN_GROUPS,
    IdleSessions,
)
from kvd.core.eviction.return_hazards import EDGES_NS, SessionClass
from shared.types.units import NS_PER_S
from tests.kvd.core.eviction.sessions import key_of

A, B = key_of("a"), key_of("b")


def class_of(idle: IdleSessions, name: str = "a") -> SessionClass:
    return idle._histories[key_of(name)].session_class


def all_sessions(idle: IdleSessions) -> SessionClass:
    return idle._hazards.class_of(())


def returns(idle: IdleSessions, num_times: int, gap_ns: int = 1) -> None:
    """Let one session return so often, after so long each time."""
    for number in range(num_times):
        idle.on_idle(A, number)
        idle.on_submit(A, number + gap_ns)


def test_turns_are_counted_from_the_first_one_on():
    """Turns before the first store count as well; many turns are one class."""
    idle = IdleSessions()
    for _ in range(2):
        idle.on_submit(A, 0)
    for num_turns in range(2, len(TURN_GROUPS) + 2):
        idle.on_idle(A, 0)
        group = (*TURN_GROUPS, MANY_TURNS, MANY_TURNS)[num_turns]
        assert class_of(idle) is idle._hazards.class_of((group, 0, 0))
        idle.on_submit(A, 0)


@pytest.mark.parametrize(
    ("gap_s", "group"), [(0, 0), (1, 1), (2, 1), (4, 2), (15, 2), (16, 3), (60, 3), (64, 4)]
)
def test_idle_time_determines_the_class(gap_s, group):
    """Classes are two octaves of seconds."""
    idle = IdleSessions()
    idle.on_idle(A, 5)
    idle.on_submit(A, 5 + gap_s * NS_PER_S)
    idle.on_idle(A, 5 + gap_s * NS_PER_S)
    assert class_of(idle) is idle._hazards.class_of((1, 0, group))


def test_the_tokens_of_the_last_turn_determine_the_class():
    """Classes are octaves of tokens; a session that shrank stored none."""
    idle = IdleSessions()
    for num_tokens, group in ((100, 7), (104, 3), (104, 0), (50, 0), (51, 1)):
        idle.on_resize(A, num_tokens)
        assert class_of(idle) is idle._hazards.class_of((0, group, 0))


def test_a_session_that_waits_for_a_tool_has_the_tools_class_until_it_returns():
    """It may become idle before or after that is known, and store in the meantime."""
    idle = IdleSessions()
    of_read = idle._tools.class_of(A.tenant, ["read"])
    idle.on_idle(A, 0)
    idle.on_await(A, ["read"])
    assert idle.awaits(A)
    assert class_of(idle) is of_read
    idle.on_resize(A, 100)
    assert class_of(idle) is of_read
    idle.on_submit(A, EDGES_NS[2])
    assert not idle.awaits(A)
    assert (of_read.seen[:4], of_read.returned[:4]) == ([1, 1, 1, 0], [0, 0, 1, 0])
    assert sum(all_sessions(idle).seen) == 0, "it is no evidence of sessions that call none"
    idle.on_idle(A, EDGES_NS[3])
    assert class_of(idle) is idle._hazards.class_of((1, 7, 0))
    idle.on_submit(A, EDGES_NS[3])
    idle.on_await(A, ["read"])
    idle.on_idle(A, EDGES_NS[4])
    assert class_of(idle) is of_read
    idle.on_await(A, [])
    assert not idle.awaits(A)
    assert class_of(idle) is idle._hazards.class_of((2, 7, 0))
    assert not idle.awaits(B)


def test_a_return_is_counted_in_its_bucket():
    """The session was seen in all buckets before, and returned in that one.

    A busy one is not seen.
    """
    idle = IdleSessions()
    idle.on_idle(A, 0)
    idle.on_submit(A, EDGES_NS[3])
    root = all_sessions(idle)
    assert root.seen[:5] == [1, 1, 1, 1, 0]
    assert root.returned[:5] == [0, 0, 0, 1, 0]
    idle.on_submit(A, EDGES_NS[9])
    assert sum(root.seen) == 4, "it was not idle"
    idle.on_idle(A, EDGES_NS[9])
    idle.on_busy([A])
    idle.on_submit(A, 2 * EDGES_NS[9])
    assert sum(root.seen) == 4
    idle.on_busy([B])
    assert not idle.rate(B)


@pytest.mark.parametrize(("late_ns", "num_returned"), [(-1, 1), (0, 0)])
def test_a_return_after_the_last_bucket_does_not_count(late_ns, num_returned):
    """The end of the last bucket is exclusive."""
    idle = IdleSessions()
    idle.on_idle(A, 0)
    idle.on_submit(A, EDGES_NS[-1] + late_ns)
    root = all_sessions(idle)
    assert sum(root.returned) == num_returned
    assert sum(root.seen) == len(EDGES_NS) - 2 + num_returned


def test_an_unused_session_ages_to_the_last_bucket():
    """It passes each bucket once, at its edge, and then no more."""
    idle = IdleSessions()
    idle.on_idle(A, 7)
    for number, (_, edge_ns) in enumerate(pairwise(EDGES_NS), 1):
        assert not list(idle.pop_aged(7 + edge_ns - 1))
        assert list(idle.pop_aged(7 + edge_ns)) == [A]
        assert not list(idle.pop_aged(7 + edge_ns))
        assert sum(all_sessions(idle).seen) == number
    assert not len(idle._ageing)
    assert not sum(all_sessions(idle).returned)


def test_a_session_in_use_does_not_age():
    """Once idle again, it ages from then on."""
    idle = IdleSessions()
    idle.on_idle(A, 0)
    idle.on_busy([A])
    assert not list(idle.pop_aged(EDGES_NS[2]))
    idle.on_idle(A, EDGES_NS[2])
    assert not list(idle.pop_aged(EDGES_NS[2] + EDGES_NS[1] - 1))
    assert list(idle.pop_aged(EDGES_NS[2] + EDGES_NS[1])) == [A]


def test_one_call_ages_a_bounded_number_of_sessions():
    """The others age in the next call."""
    idle = IdleSessions()
    for number in range(MOST_AGED + 1):
        idle.on_idle(key_of(str(number)), 0)
    assert [len(list(idle.pop_aged(EDGES_NS[1]))) for _ in range(3)] == [MOST_AGED, 1, 0]


def test_rates_are_learned_when_a_share_of_the_observations_is_new():
    """At least that share; observations that were learned are not new any more."""
    idle = IdleSessions()
    returns(idle, LEAST_NEW - 1)
    assert not idle.learn_if_due()
    returns(idle, 1)
    assert idle.learn_if_due()
    assert not idle.learn_if_due()
    num_seen = 100 * round(1 / LEARNED_SHARE)
    returns(idle, num_seen - LEAST_NEW)
    assert idle.learn_if_due()
    returns(idle, 103)
    assert not idle.learn_if_due(), f"{LEARNED_SHARE} of {num_seen + 103} are more"
    returns(idle, 1)
    assert idle.learn_if_due()


def test_rates_are_learned_after_a_number_of_new_observations():
    """However small a share they are."""
    idle = IdleSessions()
    idle._num_seen = idle._num_learned = 10 * round(MOST_NEW / LEARNED_SHARE)
    returns(idle, MOST_NEW - 1)
    assert not idle.learn_if_due()
    returns(idle, 1)
    assert idle.learn_if_due()


def test_idle_sessions_of_a_class_have_a_rate():
    """It is that of their bucket, and changes when rates are learned."""
    idle = IdleSessions()
    assert not idle.rate(A)
    returns(idle, LEAST_NEW)
    idle.on_idle(A, 0)
    assert idle.learn_if_due()
    first = idle.rate(A)
    assert first > 0
    list(idle.pop_aged(EDGES_NS[1]))
    later = idle.rate(A)
    assert later != first
    assert later == idle._hazards.rates(class_of(idle))[1]
    idle.on_busy([A])
    assert not idle.rate(A)
