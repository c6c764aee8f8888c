"""What is learned of returns, and the value of keeping a session that follows from it."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction.return_hazards import (
    EDGES_NS,
    MOST_SEEN,
    NUM_BUCKETS,
    ReturnHazards,
    bucket_at,
    observe,
    return_rates,
)
from shared.types.units import NS_PER_S

hazard_lists = st.lists(st.floats(0, 0.95), min_size=NUM_BUCKETS, max_size=NUM_BUCKETS)


def see(session_class, num_sessions, share, bucket):
    """Observe sessions until a bucket's end: so many of them return in it, the others never."""
    num_returned = round(num_sessions * share)
    for number in range(num_sessions):
        for earlier in range(bucket):
            observe(session_class, earlier, has_returned=False)
        observe(session_class, bucket, has_returned=number < num_returned)
        if number >= num_returned:
            for later in range(bucket + 1, NUM_BUCKETS):
                observe(session_class, later, has_returned=False)


@settings(deadline=None)
@given(hazard_lists)
def test_a_rate_is_the_best_share_of_returns_per_second_kept(hazards):
    """Every time to give the session up at is tried."""
    for bucket, rate in enumerate(return_rates(hazards)):
        survival, returned, seconds, best = 1.0, 0.0, 0.0, 0.0
        for later in range(bucket, NUM_BUCKETS):
            width_s = (EDGES_NS[later + 1] - EDGES_NS[later]) / NS_PER_S
            seconds += survival * width_s * (1 - hazards[later] / 2)
            returned += survival * hazards[later]
            survival *= 1 - hazards[later]
            best = max(best, returned / seconds)
        assert rate == pytest.approx(best, rel=1e-9)


def test_a_rate_is_exact_when_few_sessions_are_left():
    """It is of the remaining ones only: most of a short bucket's sessions return in each."""
    hazards = [0.95] * 30 + [0.5] + [0.0] * (NUM_BUCKETS - 31)
    width_s = (EDGES_NS[31] - EDGES_NS[30]) / NS_PER_S
    assert return_rates(hazards)[30] == pytest.approx(0.5 / (width_s * 0.75))


def test_every_idle_time_has_a_bucket():
    """Times beyond the last edge belong to the last one."""
    for bucket in range(NUM_BUCKETS):
        assert bucket_at(EDGES_NS[bucket]) == bucket
        assert bucket_at(EDGES_NS[bucket + 1] - 1) == bucket
    assert bucket_at(EDGES_NS[-1] * 10) == NUM_BUCKETS - 1


def test_before_any_observation_no_session_returns():
    """So no session is preferred."""
    hazards = ReturnHazards()
    assert hazards.rates(hazards.class_of((1, 2, 3))) == [0.0] * NUM_BUCKETS


def test_hazards_of_a_large_class_are_the_observed_ones():
    """The class has many observations, whatever its parent's are."""
    hazards = ReturnHazards()
    often, seldom = hazards.class_of((1,)), hazards.class_of((2,))
    see(often, 1500, 0.8, 14)
    see(seldom, 1500, 0.1, 18)
    hazards.learn()
    assert hazards.hazards(often)[14] == pytest.approx(0.8, abs=0.05)
    assert hazards.hazards(seldom)[18] == pytest.approx(0.1, abs=0.03)
    assert hazards.hazards(seldom)[14] < 0.1
    assert hazards.rates(often)[10] > 5 * hazards.rates(seldom)[10]


def test_a_small_class_has_its_parents_hazards_times_a_factor():
    """A few returns give the factor; the times of returns come from the parent."""
    hazards = ReturnHazards()
    see(hazards.class_of((1, 1)), 1000, 0.3, 14)
    few = hazards.class_of((1, 2))
    unseen = hazards.class_of((1, 3))
    see(few, 20, 0.9, 14)
    hazards.learn()
    parent = hazards.hazards(hazards.class_of((1,)))
    assert hazards.hazards(unseen) == pytest.approx(parent)
    assert hazards.hazards(few)[14] > 1.3 * parent[14]
    assert hazards.hazards(few)[15] == pytest.approx(
        parent[15] * hazards.hazards(few)[14] / parent[14], rel=0.5
    )


def test_unreached_buckets_have_lower_hazards_than_those_before():
    """For example because sessions were dropped by then: extrapolation is all there is."""
    hazards = ReturnHazards()
    root = hazards.class_of(())
    for _ in range(50):
        observe(root, 10, has_returned=True)
    found = hazards.hazards(root)
    assert found[10] > found[13] > found[20] > 0


def test_old_observations_fade():
    """New ones count, and counts stay bounded."""
    hazards = ReturnHazards()
    root = hazards.class_of(())
    for has_returned in (True, False):
        for _ in range(4 * int(MOST_SEEN)):
            observe(root, 10, has_returned=has_returned)
    assert root.seen[10] <= MOST_SEEN
    assert hazards.hazards(root)[10] < 0.1


def test_rates_change_only_when_rates_are_learned():
    """So an order made of them stays valid."""
    hazards = ReturnHazards()
    session_class = hazards.class_of((1,))
    before = hazards.rates(session_class)
    see(session_class, 100, 0.5, 12)
    assert hazards.rates(session_class) == before
    hazards.learn()
    assert hazards.rates(session_class) != before


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, NUM_BUCKETS - 1), st.booleans())))
def test_hazards_are_probabilities(seen):
    """Whatever was observed."""
    hazards = ReturnHazards()
    classes = [hazards.class_of((number % 2, number)) for number in range(6)]
    for number, bucket, has_returned in seen:
        observe(classes[number], bucket, has_returned=has_returned)
    hazards.learn()
    for session_class in classes:
        assert all(0 <= hazard < 1 for hazard in hazards.hazards(session_class))


def test_rates_are_computed_once_per_learning():
    """Counts in between do not change them."""
    hazards = ReturnHazards()
    session_class = hazards.class_of((1,))
    hazards.learn()
    rates = hazards.rates(session_class)
    see(session_class, 100, share=0.5, bucket=2)
    assert hazards.rates(session_class) is rates
    before = list(rates)
    hazards.learn()
    assert hazards.rates(session_class) != before


def test_counts_of_one_bucket_are_halved_together():
    """Counts of the classes above are halved as well; other buckets stay."""
    hazards = ReturnHazards()
    parent, child = hazards.class_of(()), hazards.class_of((1,))
    assert child.parent is parent
    child.seen[3], child.returned[3] = MOST_SEEN - 1, 100.0
    observe(child, 3, has_returned=False)
    assert (child.seen[3], child.returned[3]) == (MOST_SEEN, 100.0)
    observe(child, 3, has_returned=True)
    assert (child.seen[3], child.returned[3]) == ((MOST_SEEN + 1) / 2, 101.0 / 2)
    assert (parent.seen[3], parent.returned[3], sum(parent.seen)) == (2.0, 1.0, 2.0)


def test_hazards_are_smoothed_over_neighbouring_buckets():
    """By the kernel; buckets without observations follow those before, with decreasing weight."""
    hazards = ReturnHazards()
    root = hazards.class_of(())
    root.seen[10], root.returned[10] = 100.0, 50.0
    expected, before = [0.0] * NUM_BUCKETS, 0.0
    for bucket in range(8, NUM_BUCKETS):
        weight = {8: 0.25, 9: 0.6, 10: 1.0, 11: 0.6, 12: 0.25}.get(bucket, 0.0)
        around = (4 * 0.7 * before + weight * 50) / (4 + weight * 100)
        seen, returned = (100, 50) if bucket == 10 else (0, 0)
        before = expected[bucket] = (returned + 200 * around) / (seen + 200)
    assert hazards.hazards(root) == pytest.approx(expected)


def test_a_class_has_its_parents_hazards_times_a_factor():
    """The factor is that of all its returns; a bucket's own observations count beside it."""
    hazards = ReturnHazards()
    root, child = hazards.class_of(()), hazards.class_of((1,))
    root.seen[10], root.returned[10] = 1000.0, 100.0
    child.seen[10], child.returned[10] = 40.0, 30.0
    of_root = hazards.hazards(root)
    factor = (30 + 20) / (40 * of_root[10] + 20)
    expected = [400 * min(0.95, factor * hazard) / 400 for hazard in of_root]
    expected[10] = (30 + 400 * min(0.95, factor * of_root[10])) / 440
    assert hazards.hazards(child) == pytest.approx(expected)


def test_a_certain_return_needs_half_a_bucket_of_room():
    """In whichever bucket; that no session reaches the next one makes no rate wrong."""
    widths_s = [(end - start) / NS_PER_S for start, end in pairwise(EDGES_NS)]
    expected = [2 / width_s for width_s in widths_s]
    assert return_rates([1.0] * NUM_BUCKETS) == pytest.approx(expected)
