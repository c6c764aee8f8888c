"""Answers in the clients' form: calls have the same ids, streamed or whole."""

import pytest

from inference_svc.core.chat import ChoiceKind, Message, Tool, ToolCall, ToolUse
from inference_svc.core.tools.formats import FORMATS
from inference_svc.core.tools.parts import Reasoning, collect_answer
from inference_svc.core.tools.thoughts import ThoughtMarks
from inference_svc.core.turn_record import AnswerToken
from inference_svc.http_api.answer_parts import Reading
from tests.inference_svc.http_api.scripted_calls import READING, TEXT, TOKENS, USE

CALLS = (ToolCall("look", '{"a": 1}', "call_0"), ToolCall("see", '{"b": "é"}', "call_1"))


def test_a_streamed_answer_equals_the_whole_one():
    """Its text, its thoughts, and its calls with their ids."""
    reader = READING.reader()
    parts = [part for token in TOKENS for part in reader.push([token])]
    read = collect_answer([*parts, *reader.end()])
    assert read == READING.whole(TEXT)
    assert (read.content, read.reasoning, read.calls) == ("I look.", "Two words.", CALLS)
    assert reader.num_calls == 2
    assert 0 < reader.num_thought < len(TOKENS) // 2


def test_the_message_that_a_client_sends_back():
    """Without thoughts."""
    assert READING.message(TEXT) == Message("assistant", "I look.", CALLS)


def test_surplus_calls_are_dropped():
    """The first count."""
    one = Reading(FORMATS["gpt-oss"], ToolUse(USE.tools, most_calls=1))
    assert [call.name for call in one.whole(TEXT).calls] == ["look"]


@pytest.mark.parametrize(
    ("use", "callable_names", "is_read"),
    [
        (ToolUse(), [], False),
        (ToolUse((Tool("look"),), ChoiceKind.NONE), [], False),
        (ToolUse((Tool("look"), Tool("see"))), ["look", "see"], True),
        (ToolUse((Tool("look"), Tool("see")), ChoiceKind.REQUIRED, "see"), ["see"], True),
    ],
)
def test_where_calls_are_recognised(use, callable_names, is_read):
    """Only where the model may call: else an answer is text."""
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    reading = Reading(FORMATS["hermes"], use)
    assert [tool.name for tool in use.callable_tools] == callable_names
    assert reading.marks == (frozenset(FORMATS["hermes"].marks) if is_read else frozenset())
    is_call = "look" in callable_names
    assert reading.whole(text).content == ("" if is_call else text)
    assert use.is_forced == (use.choice == "required")


def test_thoughts_are_separated():
    """With or without tools; their tokens are counted with the marks, and not sent back."""
    thoughts = ThoughtMarks("<think>", "</think>")
    reading = Reading(FORMATS["hermes"], thoughts=thoughts)
    assert reading.marks == {"<think>", "</think>"}
    pieces = ["<think>", "\n", "Two", " words.", "\n</think>", "\n\n", "Hel", "lo"]
    reader = reading.reader()
    parts = reader.push([AnswerToken(1, piece) for piece in pieces[:5]])
    assert parts == [Reasoning("Two words.")]
    parts += [*reader.push([AnswerToken(1, piece) for piece in pieces[5:]]), *reader.end()]
    assert collect_answer(parts) == reading.whole("".join(pieces))
    assert reader.num_thought == 5
    assert reading.message("".join(pieces)) == Message("assistant", "Hello")


def test_a_format_of_every_answer():
    """gpt-oss writes channels without tools, too."""
    read = Reading(FORMATS["gpt-oss"]).whole("<|channel|>final<|message|>Hello")
    assert (read.content, read.calls) == ("Hello", ())


def test_a_continued_answer_is_a_message_with_its_beginning():
    """Only generated text is parsed; a mark there begins no thought."""
    thoughts = ThoughtMarks("<think>", "</think>")
    begun = Reading(thoughts=thoughts, beginning="Well, ")
    assert begun.whole("<think>so</think>").content == "<think>so</think>"
    assert begun.message("so it is.") == Message("assistant", "Well, so it is.")
    assert begun.marks == frozenset()
    assert Reading(thoughts=thoughts).message("<think>a</think>so").content == "so"


def test_grammars_of_calls():
    """Of the allowed tools; the answer's reader finds the calls."""
    thoughts = ThoughtMarks("<think>", "</think>")
    tools = (Tool("look"), Tool("see", is_strict=True))
    reading = Reading(FORMATS["hermes"], ToolUse(tools), thoughts=thoughts, is_bound=True)
    calls = reading.calls
    assert (calls.tools, calls.closings) == (tools, FORMATS["hermes"].closings)
    text = '<tool_call>{"name": "see", "arguments": {"a": "b'
    for before, is_read in (("Well. ", True), ("<think>", False)):
        reader = calls.reader()
        reader.push(before + text)
        assert (reader.last_call is not None) == is_read
    assert reading.whole(text).calls == (ToolCall("see", '{"a": "b', "call_0", is_cut=True),)
    assert Reading(FORMATS["hermes"], ToolUse(tools)).calls is None
    none = ToolUse(tools, ChoiceKind.NONE)
    assert Reading(FORMATS["gpt-oss"], none, is_bound=True).calls is None
