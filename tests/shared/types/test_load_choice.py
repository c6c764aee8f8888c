"""Whether loading pays: for the turn, for those behind it, and for expected ones."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.types.load_choice import (
    COUNTED_STARTS,
    IDLE,
    RecentStarts,
    Traffic,
    loading_pays,
    longest_wait_s,
)
from shared.types.units import NS_PER_S

# Integers, which floats represent exactly: ties are not affected by rounding.
COUNTS = st.integers(0, 1000)
SECONDS = COUNTS.map(float)
TRAFFICS = st.builds(
    Traffic,
    num_waiting=COUNTS,
    num_loading=COUNTS,
    num_places=st.integers(1, 1000),
    starts_per_s=SECONDS,
    backlog_s=SECONDS,
)


@pytest.mark.parametrize(
    ("wait_s", "busy_s", "pays"), [(1.0, 1.0, True), (2.1, 0.0, False), (0.0, 2.1, False)]
)
def test_alone_the_faster_way_wins(wait_s, busy_s, pays):
    """Waiting and copying count alike."""
    assert loading_pays(wait_s, busy_s, 2.0, IDLE) is pays


@pytest.mark.parametrize("behind", ["num_waiting", "num_loading"])
def test_turns_behind_wait_for_computing_but_not_for_a_read(behind):
    """One of them outweighs a wait of nearly twice the computing; copying delays it, too."""
    one = replace(Traffic(num_places=100), **{behind: 1})
    assert loading_pays(3.9, 0.0, 2.0, one)
    assert not loading_pays(4.1, 0.0, 2.0, one)
    assert not loading_pays(0.0, 2.1, 2.0, one)


def test_turns_without_a_place_wait_for_those_with_one():
    """With a single place a wait delays all turns as much as computing does."""
    assert not loading_pays(2.1, 0.0, 2.0, Traffic(num_waiting=1000, num_places=1))
    assert loading_pays(7.9, 0.0, 2.0, Traffic(num_waiting=1000, num_places=4))
    assert not loading_pays(8.1, 0.0, 2.0, Traffic(num_waiting=1000, num_places=4))


def test_earlier_computing_hides_a_wait():
    """The turn could not begin earlier anyway."""
    assert loading_pays(5.0, 0.0, 2.0, Traffic(backlog_s=3.0))
    assert not loading_pays(5.1, 0.0, 2.0, Traffic(backlog_s=3.0))


def test_expected_turns_count():
    """Those that arrive while the turn, and those before it, are computed."""
    assert loading_pays(3.9, 0.0, 2.0, Traffic(starts_per_s=0.5))
    assert not loading_pays(4.1, 0.0, 2.0, Traffic(starts_per_s=0.5))
    assert loading_pays(7.9, 0.0, 2.0, Traffic(starts_per_s=0.5, backlog_s=2.0))
    assert not loading_pays(8.1, 0.0, 2.0, Traffic(starts_per_s=0.5, backlog_s=2.0))


@given(SECONDS, SECONDS, SECONDS, TRAFFICS, SECONDS)
def test_improvements_of_loading_never_speak_against_it(wait, busy, compute, traffic, more):
    """Less waiting, less copying, more computing, more hidden time, more places."""
    if loading_pays(wait, busy, compute, traffic):
        assert loading_pays(max(0.0, wait - more), busy, compute, traffic)
        assert loading_pays(wait, max(0.0, busy - more), compute, traffic)
        places = traffic.num_places + int(more)
        assert loading_pays(wait, busy, compute, replace(traffic, num_places=places))
        if busy <= compute:
            assert loading_pays(wait, busy, compute + more, traffic)
            behind = replace(traffic, num_loading=traffic.num_loading + int(more))
            assert loading_pays(wait, busy, compute, behind)
            hidden = replace(traffic, backlog_s=traffic.backlog_s + more)
            assert loading_pays(wait, busy, compute, hidden)


@given(SECONDS, SECONDS, SECONDS, TRAFFICS)
def test_copying_slower_than_computing_never_pays(wait, busy, compute, traffic):
    """All turns would wait for it as they would for computing."""
    assert not loading_pays(wait, compute + busy + 1, compute, traffic)


@given(SECONDS, SECONDS, SECONDS, TRAFFICS)
def test_the_unit_of_time_does_not_matter(wait, busy, compute, traffic):
    """A machine that is uniformly faster decides alike."""
    faster = replace(
        traffic, backlog_s=traffic.backlog_s / 64, starts_per_s=traffic.starts_per_s * 64
    )
    pays = loading_pays(wait, busy, compute, traffic)
    assert loading_pays(wait / 64, busy / 64, compute / 64, faster) is pays


@pytest.mark.parametrize(
    ("busy_s", "traffic", "longest_s"),
    [
        (0.0, IDLE, 2.0),
        (0.5, IDLE, 1.5),
        (2.5, IDLE, 0.0),
        (0.0, Traffic(backlog_s=3.0), 5.0),
        (0.0, Traffic(num_waiting=1, num_places=1), 2.0),
        (0.0, Traffic(num_waiting=1, num_places=1, backlog_s=8.0), 4.0),
    ],
)
def test_the_longest_wait_that_pays(busy_s, traffic, longest_s):
    """Alone as long as computing takes; hidden time makes it longer."""
    assert longest_wait_s(busy_s, 2.0, traffic) == longest_s


@given(SECONDS, SECONDS, TRAFFICS)
def test_loading_pays_up_to_the_longest_wait(busy, compute, traffic):
    """And not beyond; if it is zero, even that may not pay."""
    longest_s = longest_wait_s(busy, compute, traffic)
    assert longest_s >= 0
    assert not loading_pays(longest_s * 1.001 + 0.001, busy, compute, traffic)
    if longest_s:
        assert loading_pays(longest_s * 0.999, busy, compute, traffic)


def test_recent_starts_give_the_rate():
    """A pause before them is forgotten after so many starts, while none follow."""
    starts = RecentStarts()
    assert starts.per_s(0) == 0.0
    starts.record(0)
    assert starts.per_s(NS_PER_S) == 0.0  # one says nothing
    starts.record(2 * NS_PER_S)
    assert starts.per_s(2 * NS_PER_S) == 0.5
    night_ns = 10_000 * NS_PER_S
    for second in range(COUNTED_STARTS):
        starts.record(night_ns + second * NS_PER_S)
    last_ns = night_ns + (COUNTED_STARTS - 1) * NS_PER_S
    assert starts.per_s(last_ns) == 1.0
    assert starts.per_s(2 * last_ns - night_ns) == 0.5


def test_simultaneous_starts_give_no_rate_yet():
    """No time has passed."""
    starts = RecentStarts()
    starts.record(5)
    starts.record(5)
    assert starts.per_s(5) == 0.0
