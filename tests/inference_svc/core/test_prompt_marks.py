"""Prompt marks: where conversations turn, and now and then in a long prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.prompt_marks import prompt_marks


@pytest.mark.parametrize(
    ("num_tokens", "turning_points", "every", "marks"),
    [
        (100, (20, 95), 0, (20, 95)),
        (100, (20, 95), 40, (20, 40, 80, 95)),
        (100, (40, 40), 40, (40, 80)),
        (100, (0, 100), 50, (50,)),  # 0 is none, and behind the last token is no mark
        (100, (), 100, ()),
        (1, (0, 1), 1, ()),
    ],
)
def test_marks_are_where_others_may_leave_a_context(num_tokens, turning_points, every, marks):
    """Turning points, and multiples of a number of tokens."""
    assert prompt_marks(num_tokens, turning_points, every) == marks


@given(st.integers(1, 200), st.lists(st.integers(0, 250)), st.integers(0, 60), st.integers(0, 99))
def test_prompts_that_begin_alike_have_marks_at_the_same_places(size, points, every, more):
    """A longer prompt keeps those of a shorter one, and all are inside, in order."""
    marks = prompt_marks(size, points, every)
    assert list(marks) == sorted(set(marks))
    assert all(0 < mark < size for mark in marks)
    assert set(marks) <= set(prompt_marks(size + more, points, every))
