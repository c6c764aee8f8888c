"""What can be continued where layers attend to the last tokens only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.attention_window import HeldRows, is_whole


@pytest.mark.parametrize(
    ("num_tokens", "window_from", "window", "whole"),
    [
        (10, 4, 0, True),  # no layer has a window
        (10, 0, 4, True),  # no row is missing
        (3, 0, 4, True),
        (10, 6, 4, True),
        (10, 7, 4, False),
        (4, 1, 4, False),
    ],
)
def test_a_window_must_be_complete(num_tokens, window_from, window, whole):
    """All tokens that the next one attends to must have rows."""
    assert is_whole(num_tokens, window_from, window) == whole


# Five in six layers of equal width have a window.
GEMMA = HeldRows(window=1024, spare_tokens=32, step_tokens=512, token_items=6, full_items=1)
ROWS = st.builds(
    HeldRows,
    window=st.integers(1, 20),
    spare_tokens=st.integers(1, 9),
    step_tokens=st.integers(1, 9),
    token_items=st.just(7),
    full_items=st.integers(1, 6),
)


def test_a_long_sequence_takes_fewer_slots_than_its_tokens():
    """Short ones take one per token."""
    assert GEMMA.num_rows == 1568
    assert GEMMA.slots_for(1568) == 1568
    assert GEMMA.slots_for(1569) == 1569
    assert GEMMA.slots_for(1574) == 1569
    assert GEMMA.slots_for(16_384) == 4038 < 0.25 * 16_384
    assert GEMMA.tokens_in(4038) == 16_388


@given(ROWS, st.integers(0, 200))
def test_slots_are_the_memory_that_a_sequence_has(rows, number):
    """Neither fewer nor more, whether computed from tokens or from slots."""
    for num_tokens in (number, rows.tokens_in(number)):
        num_slots = rows.slots_for(num_tokens)
        items = num_tokens * rows.full_items
        items += min(num_tokens, rows.num_rows) * (rows.token_items - rows.full_items)
        assert items <= num_slots * rows.token_items < items + rows.token_items
    assert rows.slots_for(rows.tokens_in(number)) == number
    assert rows.tokens_in(rows.slots_for(number)) >= number


@given(ROWS, st.data())
def test_rows_are_freed_before_they_are_full(rows, data):
    """New tokens have rows, and those before them stay that are attended to, and some more."""
    num_tokens = data.draw(st.integers(0, 60))
    first = max(0, num_tokens - rows.kept_tokens)
    for num_new in data.draw(st.lists(st.integers(1, rows.step_tokens), max_size=80)):
        window_from = rows.first_held(first, num_tokens, num_new)
        assert first <= window_from <= max(first, num_tokens - rows.kept_tokens)
        first, num_tokens = window_from, num_tokens + num_new
        assert num_tokens - first <= rows.num_rows


def test_a_long_answer_moves_its_window_rarely():
    """By half of the tokens of a step, so that as many can be taken back."""
    window_from, moves = GEMMA.first_held(0, 3000, 512), []
    for num_tokens in range(3512, 6000):
        first = GEMMA.first_held(window_from, num_tokens, 1)
        if first > window_from:
            moves.append(first - window_from)
            assert is_whole(num_tokens - 256, first, GEMMA.window)
        window_from = first
    assert moves == [257] * len(moves)
    assert len(moves) == 10


def test_a_sequence_that_is_short_of_rows_is_a_bug():
    """It would compute more tokens at once than a step has."""
    with pytest.raises(AssertionError, match="at once"):
        GEMMA.first_held(0, 3000, 513)
