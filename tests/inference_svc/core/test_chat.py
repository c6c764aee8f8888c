"""Messages, tools and calls, as templates take them."""

import pytest

from inference_svc.core.chat import ASSISTANT, TOOL, USER, Message, Tool, ToolCall, canonical

CALL = ToolCall("a", '{"b": [1]}', "one")


def test_a_tool_has_a_schema_of_an_object():
    """Whatever the client left out; what it said stays."""
    assert Tool("a").schema == {"type": "object", "properties": {}}
    schema = {"properties": {"b": {"type": "null"}}, "required": ["b"]}
    assert Tool("a", "c", schema).as_template() == {
        "type": "function",
        "function": {
            "name": "a",
            "description": "c",
            "parameters": {"type": "object", **schema},
        },
    }


def test_a_message_says_what_it_has():
    """No more: templates ask whether there are calls."""
    assert Message(USER, "b").as_template() == {"role": "user", "content": "b"}
    assert Message(ASSISTANT, "", (CALL,)).as_template() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "id": "one", "function": {"name": "a", "arguments": {"b": [1]}}}
        ],
    }
    assert Message(TOOL, "b", (), "one").as_template() == {
        "role": "tool",
        "content": "b",
        "tool_call_id": "one",
        "name": "",
    }


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Message(USER, ""), False),
        (Message(USER, "a"), True),
        (Message(ASSISTANT, "", (CALL,)), True),
        (Message(TOOL, "", (), "one"), True),
    ],
)
def test_what_says_anything(message, says):
    """A tool may return nothing, and that is something."""
    assert message.has_content == says


def test_equal_tools_are_equal_texts():
    """In their order; none are no text."""
    assert canonical([]) == ""
    assert canonical([Tool("a"), Tool("é")]) == canonical((Tool("a"), Tool("é")))
    assert canonical([Tool("a"), Tool("é")]) != canonical([Tool("é"), Tool("a")])
    assert "é" in canonical([Tool("é")])
