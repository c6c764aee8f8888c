"""Ranges of tokens: merged, what they leave, and that nothing is lost on the way."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.errors import InvalidDiscardError
from inference_svc.core.ranges import clip, kept_runs, merge_ranges, num_in, position_after, without

MOST = 60


@st.composite
def contexts(draw):
    """A context's length, and ranges inside it in any order, overlapping or not."""
    num_tokens = draw(st.integers(1, MOST))
    start = st.integers(0, num_tokens - 1)
    ranges = draw(
        st.lists(start.flatmap(lambda s: st.tuples(st.just(s), st.integers(s + 1, num_tokens))))
    )
    return num_tokens, ranges


def positions(ranges):
    return {position for start, end in ranges for position in range(start, end)}


@given(contexts())
def test_merged_ranges_are_the_same_positions_in_order_and_apart(context):
    """Whatever order they came in; merging again changes nothing."""
    num_tokens, ranges = context
    merged = merge_ranges(ranges, num_tokens)
    assert positions(merged) == positions(ranges)
    assert num_in(merged) == len(positions(ranges))
    assert all(start < end for start, end in merged)
    assert all(end < start for (_, end), (start, _) in pairwise(merged)), "they do not touch"
    assert merge_ranges(merged, num_tokens) == merged


@given(contexts(), st.integers(0, MOST))
def test_what_is_kept_is_what_is_not_dropped(context, limit):
    """Of any number of leading positions: of what is computed, or was there before the turn."""
    num_tokens, ranges = context
    merged, limit = merge_ranges(ranges, num_tokens), min(limit, num_tokens)
    kept = kept_runs(merged, limit)
    assert positions(kept) == set(range(limit)) - positions(merged)
    assert all(start < end for start, end in kept)
    assert kept == sorted(kept)
    assert without(range(limit), merged) == sorted(positions(kept))


@given(contexts(), st.data())
def test_two_discards_are_one_of_both(context, data):
    """Positions of the second are those in what the first has left."""
    num_tokens, ranges = context
    first = merge_ranges(ranges, num_tokens)
    left = without(range(num_tokens), first)
    if not left:
        return
    start = data.draw(st.integers(0, len(left) - 1))
    end = data.draw(st.integers(start + 1, len(left)))
    both = merge_ranges([*first, *((left[i], left[i] + 1) for i in range(start, end))], num_tokens)
    assert without(left, [(start, end)]) == without(range(num_tokens), both)


@pytest.mark.parametrize("bad", [(0, 0), (3, 2), (-1, 2), (9, 11), (10, 11)])
def test_a_range_that_is_empty_or_outside_is_refused(bad):
    """The message says which, and of how many tokens."""
    with pytest.raises(InvalidDiscardError, match=rf"\[{bad[0]}, {bad[1]}\).* 10 tokens"):
        merge_ranges([(1, 2), bad], 10)


def test_nothing_dropped_leaves_all():
    """No range is a discard of nothing."""
    assert merge_ranges([], 5) == ()
    assert kept_runs((), 5) == [(0, 5)]
    assert kept_runs((), 0) == []
    assert kept_runs(((0, 5),), 5) == []


@pytest.mark.parametrize(
    ("num_tokens", "left"),
    [(1, ()), (2, ((1, 2),)), (4, ((1, 3),)), (5, ((1, 3), (4, 5))), (9, ((1, 3), (4, 6)))],
)
def test_ranges_are_clipped_to_the_first_tokens(num_tokens, left):
    """None of them is empty: a range that begins where the tokens end is not among them."""
    assert clip(((1, 3), (4, 6)), num_tokens) == left


@given(st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_a_discard_moves_what_is_left(position, dropped):
    """What is there stays there, whatever goes before it or of it."""
    ranges = merge_ranges([(token, token + 1) for token in dropped], 30)
    left = without(range(30), ranges)
    first = position_after(position, ranges)
    assert [token >= position for token in left] == [at >= first for at in range(len(left))]
