"""Causes of misses, from the first difference between two conversations."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.misses import (
    CAUSE_TEXTS,
    RECOMPUTE_TEXTS,
    MissCause,
    Wording,
    cause_of,
    describe_cause,
    differ_in_time,
    message_index,
)

SAME = Wording("", "", "You are brief.", "")


def cause(was, now, common="", role="user", *, old=SAME, new=SAME, in_opening=False):
    return cause_of(
        replace(old, following=was),
        replace(new, following=now),
        common,
        role,
        in_opening=in_opening,
        thoughts=("<think>",),
    )


@pytest.mark.parametrize(
    ("common", "was", "now"),
    [
        ("Today is 2026-11-2", "3.\nYou help.", "4.\nYou help."),
        ("Today is ", "2026-11-30T09:41:12Z. You", "2026-12-01T10:00:00Z. You"),
        ("Date: ", "23 Nov 2026\n\nUse", "24 Dec 2026\n\nUse"),
        ("It is ", "Monday, 23 November. Be", "Tuesday, 24 November. Be"),
        ("It is ", "November 9th, 2026. Be", "November 10th, 2026. Be"),
        ("time: 1", "1:59 pm, in Oslo", "2:01 pm, in Oslo"),
        ("", "23/11/26", "24/11/26"),
        ("now=17", "95431200;", "95517600;"),
    ],
)
def test_dates_and_times_are_recognised(common, was, now):
    """In any notation, and wherever tokens cut them."""
    assert differ_in_time(common, was, now)
    assert cause(was, now, common, "system", in_opening=True) is MissCause.DATE


@pytest.mark.parametrize(
    ("common", "was", "now"),
    [
        ("I have ", "5 apples", "6 apples"),
        ("", "May I come?", "May we come?"),
        ("Today is 2026-11-2", "3. You help.", "4. Be brief."),
        ("Today is ", "2026-11-23.", "a day."),
        ("", "Mon ami", "Sun rise"),
        ("", "", "x"),
    ],
)
def test_other_texts_are_no_dates(common, was, now):
    """Numbers, words that also name months, and texts that continue differently."""
    assert not differ_in_time(common, was, now)


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_any_text_has_a_cause(common, was, now):
    assert cause(was, now, common) in MissCause


def test_the_changed_part_is_named():
    """In that order: arguments, tools, the system message, thoughts, answers, anything else."""
    tools = replace(SAME, tools_digest="a", opening="look write")
    other = replace(SAME, tools_digest="b", opening="write look")
    assert cause("a", "b", new=replace(SAME, arguments="{}")) is MissCause.TEMPLATE_ARGUMENTS
    assert cause("a", "b", old=tools, new=other) is MissCause.TOOLS_REORDERED
    more = replace(other, opening="write look seek")
    assert cause("a", "b", old=tools, new=more) is MissCause.TOOLS_CHANGED
    assert cause("a", "b", old=tools, in_opening=True) is MissCause.TOOLS_CHANGED
    assert cause("a", "b", in_opening=True) is MissCause.SYSTEM
    assert cause("a", "b", role="system") is MissCause.SYSTEM
    assert cause("<think>\nSo", "Yes", role="assistant") is MissCause.REASONING
    assert cause("<think>\nSo", "<think>\nNo", role="assistant") is MissCause.ANSWER
    assert cause("a", "b", role="assistant") is MissCause.ANSWER
    assert cause("a", "b", role="tool") is MissCause.MESSAGE
    assert cause("a", "b", role="") is MissCause.MESSAGE


def test_every_cause_has_a_sentence():
    """And every reason; an unknown one of another release is given by name."""
    assert set(CAUSE_TEXTS) == set(MissCause)
    assert describe_cause("message_edited") == CAUSE_TEXTS[MissCause.MESSAGE]
    assert describe_cause("expired") == RECOMPUTE_TEXTS["expired"]
    assert describe_cause("of_another_release") == "of_another_release"


def test_the_message_of_a_token_is_found():
    """Among those of the client: a system message of the template does not count."""
    starts = [0, 10, 20, 30]
    found = [message_index(starts, at, 3) for at in (0, 9, 10, 25, 30, 99)]
    assert found == [0, 0, 1, 2, 3, 3]
    assert [message_index(starts, at, 2) for at in (0, 9, 10, 25)] == [0, 0, 0, 1]
    assert message_index(starts, 0, 5) is None
    assert message_index([], 0, 1) is None
