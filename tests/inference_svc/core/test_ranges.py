"""Ranges of tokens: merging, their rest, and composition."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.errors import InvalidDiscardError
from inference_svc.core.ranges import clip, kept_runs, merge_ranges, num_in, position_after, without

MOST = 60


@st.composite
def contexts(draw):
    """Draw a context's length, and ranges in it in any order, overlapping or not."""
    num_tokens = draw(st.integers(1, MOST))
    start = st.integers(0, num_tokens - 1)
    ranges = draw(
        st.lists(start.flatmap(lambda s: st.tuples(st.just(s), st.integers(s + 1, num_tokens))))
    )
    return num_tokens, ranges


def positions(ranges):
    return {position for start, end in ranges for position in range(start, end)}


@given(contexts())
def test_merging_keeps_the_positions(context):
    """In order and separate, whatever the order before; merging again changes nothing."""
    num_tokens, ranges = context
    merged = merge_ranges(ranges, num_tokens)
    assert positions(merged) == positions(ranges)
    assert num_in(merged) == len(positions(ranges))
    assert all(start < end for start, end in merged)
    assert all(end < start for (_, end), (start, _) in pairwise(merged)), "they do not touch"
    assert merge_ranges(merged, num_tokens) == merged


@given(contexts(), st.integers(0, MOST))
def test_what_is_kept_is_what_is_not_dropped(context, limit):
    """Of any number of leading positions: of computed ones, or those before the turn."""
    num_tokens, ranges = context
    merged, limit = merge_ranges(ranges, num_tokens), min(limit, num_tokens)
    kept = kept_runs(merged, limit)
    assert positions(kept) == set(range(limit)) - positions(merged)
    assert all(start < end for start, end in kept)
    assert kept == sorted(kept)
    assert without(range(limit), merged) == sorted(positions(kept))


@given(contexts(), st.data())
def test_two_discards_combine(context, data):
    """Positions of the second refer to the result of the first."""
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
def test_an_empty_or_outside_range_is_refused(bad):
    """The message has the range, and the number of tokens."""
    with pytest.raises(InvalidDiscardError, match=rf"\[{bad[0]}, {bad[1]}\).* 10 tokens"):
        merge_ranges([(1, 2), bad], 10)


def test_no_range_drops_nothing():
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
    """None of them is empty: a range that begins where the tokens end is left out."""
    assert clip(((1, 3), (4, 6)), num_tokens) == left


@given(st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_a_discard_moves_the_rest(position, dropped):
    """Protected tokens stay protected, whatever is dropped before them or of them."""
    ranges = merge_ranges([(token, token + 1) for token in dropped], 30)
    left = without(range(30), ranges)
    first = position_after(position, ranges)
    assert [token >= position for token in left] == [at >= first for at in range(len(left))]
