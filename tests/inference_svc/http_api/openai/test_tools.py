"""Tools of a request, and the choice among them."""

import pytest

from inference_svc.core.chat import ChoiceKind, Message, Tool, ToolCall
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.bodies.tools import MAX_TOOLS
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.openai.responses.response_body import ResponseBody

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOOK = {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": True}
CHAT_LOOK = {"type": "function", "function": LOOK}
NAMED = {"type": "function", "function": {"name": "look"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def chat(*messages, **fields):
    said = messages or ({"role": "user", "content": "?"},)
    return decode(ChatBody, {"model": "m", "messages": list(said), **fields})


def test_both_apis_give_the_same_tools():
    """A chat's are nested, a response's are not."""
    tool = Tool("look", "Looks.", SCHEMA, is_strict=True)
    response = {"model": "m", "input": "?", "tools": [{"type": "function", **LOOK}]}
    assert chat(tools=[CHAT_LOOK]).offered == (tool,)
    assert decode(ResponseBody, response).offered == (tool,)
    assert Tool("look").schema == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("choice", "kind", "name", "shown"),
    [
        (None, ChoiceKind.AUTO, "", "auto"),
        ("auto", ChoiceKind.AUTO, "", "auto"),
        ("none", ChoiceKind.NONE, "", "none"),
        ("required", ChoiceKind.REQUIRED, "", "required"),
        (NAMED, ChoiceKind.REQUIRED, "look", {"type": "function", "name": "look"}),
        ({"type": "function", "name": "look"}, ChoiceKind.REQUIRED, "look", None),
    ],
)
def test_the_tool_choice(choice, kind, name, shown):
    """In OpenAI's words, of both APIs."""
    body = chat(tools=[CHAT_LOOK], tool_choice=choice)
    assert (body.tool_use.choice, body.tool_use.name) == (kind, name)
    assert body.tool_use.most_calls is None
    assert shown is None or body.shown_choice == shown


def test_one_call_at_most_on_request():
    """If the client accepts no more."""
    assert chat(tools=[CHAT_LOOK], parallel_tool_calls=False).tool_use.most_calls == 1


def test_calls_and_their_results_as_messages():
    """A result has its tool's name."""
    body = chat(
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    )
    assert body.conversation[1:] == (
        Message("assistant", "", (ToolCall("look", '{"a": 1}', "c1"),)),
        Message("tool", "", tool_call_id="c1", name="look"),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [CHAT_LOOK, CHAT_LOOK]}, "tools"),
        ({"tools": [CHAT_LOOK] * (MAX_TOOLS + 1)}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": [CHAT_LOOK]}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": [CHAT_LOOK]}, "tool_choice.type"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "?", "tool_call_id": "c"}]},
            "messages[0].tool_call_id",
        ),
        (
            {"messages": [{"role": "user", "content": "?", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
    ],
)
def test_invalid_tools(fields, param):
    """The member is named, with the remedy."""
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.remedy
