"""What can be built on where layers attend to the last tokens only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.attention_window import after_discard, is_whole
from inference_svc.core.discards import merge_ranges, without


@pytest.mark.parametrize(
    ("num_tokens", "window_from", "window", "whole"),
    [
        (10, 4, 0, True),  # no layer has a window
        (10, 0, 4, True),  # nothing is missing
        (3, 0, 4, True),
        (10, 6, 4, True),
        (10, 7, 4, False),
        (4, 1, 4, False),
    ],
)
def test_a_window_is_there_or_nothing_can_be_built_on(num_tokens, window_from, window, whole):
    """All tokens that the next one attends to have to be there."""
    assert is_whole(num_tokens, window_from, window) == whole


@given(st.integers(0, 30), st.sets(st.integers(0, 29)))
def test_a_discard_moves_what_is_left(window_from, dropped):
    """What is there stays there, whatever goes before it or of it."""
    ranges = merge_ranges([(token, token + 1) for token in dropped], 30)
    left = without(range(30), ranges)
    first = after_discard(window_from, ranges)
    assert [token >= window_from for token in left] == [at >= first for at in range(len(left))]
