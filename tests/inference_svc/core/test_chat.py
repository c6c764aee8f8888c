"""Messages, tools and calls in the form that templates get."""

import pytest

from inference_svc.core.chat import ASSISTANT, TOOL, USER, Message, Tool, ToolCall, canonical

CALL = ToolCall("a", '{"b": [1]}', "one")


def test_a_tool_has_an_object_schema():
    """Whatever the client left out; its own values stay."""
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


def test_a_message_has_only_its_own_fields():
    """Templates check whether there are calls."""
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
def test_which_messages_have_content(message, says):
    """A tool may return nothing, which counts as content."""
    assert message.has_content == says


def test_equal_tools_have_equal_texts():
    """In their order; no tools have no text."""
    assert canonical([]) == ""
    assert canonical([Tool("a"), Tool("é")]) == canonical((Tool("a"), Tool("é")))
    assert canonical([Tool("a"), Tool("é")]) != canonical([Tool("é"), Tool("a")])
    assert "é" in canonical([Tool("é")])
