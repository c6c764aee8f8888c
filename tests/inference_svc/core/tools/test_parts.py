"""The parts of an answer, put together."""

from inference_svc.core.chat import ToolCall
from inference_svc.core.tools.parts import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
    joined,
    summed,
    with_whole_calls,
)

MADE = ToolCall("a", "{}")


def test_an_answer_is_summed_up():
    """By kind, each in order."""
    parts = [Content("a"), Reasoning("b"), MADE, Content("c"), Reasoning("d")]
    found = summed(parts)
    assert (found.content, found.reasoning, found.calls) == ("ac", "bd", (MADE,))


def test_a_call_in_pieces_is_one():
    """With its id; also one that was cut."""
    pieces = [CallArguments('{"b"'), CallArguments(": 1")]
    parts = [CallBegun("a", "c1"), *pieces, CallEnded(is_cut=True), Content("x")]
    assert list(with_whole_calls(parts)) == [
        ToolCall("a", '{"b": 1', "c1", is_cut=True),
        Content("x"),
    ]


def test_texts_that_follow_one_another_are_joined():
    """Of a kind."""
    parts = [Content("a"), Content("b"), Reasoning("c"), Reasoning("d"), MADE, Content("e")]
    assert joined(parts) == [Content("ab"), Reasoning("cd"), MADE, Content("e")]
