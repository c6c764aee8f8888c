"""A model's thoughts before its answer are separated, however the text streams."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.formats import FORMATS
from inference_svc.core.tools.parts import collect_answer
from inference_svc.core.tools.reader import PlainReader, read_whole
from inference_svc.core.tools.thoughts import ThoughtMarks, ThoughtReader, marks_in

MARKS = ThoughtMarks("<think>", "</think>")
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def reader(name=""):
    """Make a reader of thoughts, in front of a format of calls."""
    return ThoughtReader(MARKS, FORMATS[name].reader({"look"}, None) if name else PlainReader())


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nTwo words.\n</think>\n\nHello", "Two words.", "Hello"),
        (" \n<think>a\n\n b</think>c ", "a\n\n b", "c "),
        ("<think>\n\n</think>\n\nHello", "", "Hello"),
        ("<think></think>", "", ""),
        ("<think>a < b </think", "a < b </think", ""),
        ("<think> ", "", ""),
        ("Hello <think>a</think>", "", "Hello <think>a</think>"),
        ("<think>a</think>b <think>c</think>", "a", "b <think>c</think>"),
        ("</think>Hello", "", "</think>Hello"),
        (" <thin", "", " <thin"),
        ("<thinner>", "", "<thinner>"),
        (" \n", "", " \n"),
        ("", "", ""),
    ],
)
def test_a_thought_is_the_text_between_marks_at_the_beginning(text, reasoning, content):
    """Without the blanks around it; an unclosed one is all thought."""
    read = read_whole(reader(), text)
    assert (read.reasoning, read.content) == (reasoning, content)


def test_a_call_may_follow_a_thought():
    """Calls within the thought are ignored."""
    read = read_whole(reader("hermes"), f"<think>{CALL}?</think>\n{CALL}")
    assert (read.reasoning, read.content) == (f"{CALL}?", "")
    assert read.calls == (ToolCall("look", "{}"),)


@given(
    st.lists(st.sampled_from([*"<think>/ \n", "<think>", "</think>", "a", CALL]), max_size=12),
    st.lists(st.integers(0, 80), max_size=8),
)
def test_pieces_are_read_like_the_whole(parts, cuts):
    """Wherever they are cut."""
    text = "".join(parts)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    one = reader("hermes")
    found = [part for start, end in pairwise(edges) for part in one.push(text[start:end])]
    assert collect_answer([*found, *one.end()]) == read_whole(reader("hermes"), text)


def test_an_active_thought_is_recognised():
    """Between complete marks."""
    one = reader()
    states = []
    for piece in ("\n", "<thi", "nk>", "a", "</thi", "nk>", "b"):
        one.push(piece)
        states.append(one.is_thinking)
    assert states == [False, False, True, True, True, False, False]


@pytest.mark.parametrize(
    ("template", "opening"),
    [
        ("{{ '<think>\\n' }}", "<think>"),
        ("{{ m.content.split('</think>')[-1] }}", "<think>"),
        ("[THINK]{{ m.reasoning }}[/THINK]", "[THINK]"),
        ("{{ m.content }}", None),
    ],
)
def test_marks_come_from_the_template(template, opening):
    """For templates without marks no thought is separated."""
    marks = marks_in(template)
    assert (marks and marks.opening) == opening


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ("user: hi assistant: <think>\n", "<think>"),
        ("assistant:<think>", "<think>"),
        ("assistant:<think>\n\n</think>\n\n", ""),
        ("assistant: ", ""),
    ],
)
def test_a_prompt_may_begin_a_thought(prompt, begun):
    """It may also close it at once."""
    assert MARKS.open_mark_in(prompt) == begun
