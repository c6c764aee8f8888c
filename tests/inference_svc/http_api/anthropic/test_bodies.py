"""Bodies of /v1/messages: their conversation, and refused ones."""

import json

import pytest

from inference_svc.core.chat import ChoiceKind, Message, Tool, ToolCall, ToolUse
from inference_svc.core.retention import Retention
from inference_svc.http_api.anthropic.bodies import MessagesBody, PromptBody
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.bodies.conversation import MAX_PARTS
from inference_svc.http_api.bodies.tools import MAX_DEPTH
from inference_svc.http_api.errors import (
    RequestError,
    UnknownParameterError,
    UnsupportedValueError,
)

HELLO = {"role": "user", "content": "Hello"}
PLAIN = {"model": "m", "max_tokens": 8, "messages": [HELLO]}
LOOK_UP = {"name": "look_up", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"word": "é"}}
CALLED = {"role": "assistant", "content": [CALL]}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Found."}
DEEP = json.loads('{"a":[' * MAX_DEPTH + "]}" * MAX_DEPTH)
KEPT = {"type": "ephemeral", "ttl": "1h"}


def conversation(**members):
    """Return roles and texts of a body with these members."""
    said = decode(MessagesBody, {**PLAIN, **members}).conversation
    return [(message.role, message.content) for message in said]


def messages_of(*given):
    """Return the messages of a body with these messages."""
    return decode(MessagesBody, {**PLAIN, "messages": list(given)}).conversation


def results(*blocks):
    return {"role": "user", "content": list(blocks)}


def block(text, **members):
    return {"type": "text", "text": text, **members}


def test_a_conversation_is_read():
    """The system comes first; text and text blocks are equal; blocks are paragraphs."""
    assert conversation(system="Be brief.") == [("system", "Be brief."), ("user", "Hello")]
    blocks = [block("One."), block("Two.", cache_control={"type": "ephemeral"})]
    assert conversation(system=blocks)[0] == ("system", "One.\n\nTwo.")
    given = [HELLO, {"role": "assistant", "content": [block("Hi")]}, {**HELLO, "content": blocks}]
    assert conversation(messages=given) == [
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("user", "One.\n\nTwo."),
    ]


def test_adjacent_messages_of_one_role_are_joined():
    """Templates need turns; an early system message is joined with the system's."""
    late = {"role": "system", "content": "Be kind."}
    assert conversation(system="Be brief.", messages=[late, HELLO, HELLO]) == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "Hello\n\nHello"),
    ]


def test_an_empty_answer_is_a_message():
    """Clients send an answer without text as a message without blocks."""
    given = [HELLO, {"role": "assistant", "content": []}, HELLO]
    assert [role for role, _ in conversation(messages=given)] == ["user", "assistant", "user"]


def test_volatile_parts_are_ignored():
    """Otherwise nothing behind them could be reused; only in the system, where clients put them."""
    header = block("x-anthropic-billing-header: cc_version=2.1.9; cch=74943;")
    assert conversation(system=[header, block("Be brief.")])[0] == ("system", "Be brief.")
    assert conversation(system=[header]) == [("user", "Hello")]
    assert conversation(messages=[{**HELLO, "content": [header]}])[0][1] == header["text"]


def test_an_answer_with_calls_is_one_message():
    """Its texts are joined; thoughts are dropped; results have their tool's name."""
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    hidden = {"type": "redacted_thinking", "data": "x"}
    other = {**CALL, "id": "toolu_2", "input": {}, "cache_control": KEPT}
    answer = [thought, block("I "), CALL, block("look."), hidden, other]
    said = messages_of(HELLO, {"role": "assistant", "content": answer}, results(RESULT))
    calls = (ToolCall("look_up", '{"word": "é"}', "toolu_1"), ToolCall("look_up", "{}", "toolu_2"))
    assert said[1:] == (
        Message("assistant", "I look.", calls),
        Message("tool", "Found.", tool_call_id="toolu_1", name="look_up"),
    )


def test_adjacent_answers_are_joined():
    """Clients send each block as a message of its own; calls stay in order."""
    texts = {"role": "assistant", "content": "I look."}
    other = {"role": "assistant", "content": [{**CALL, "id": "toolu_2"}]}
    said = messages_of(HELLO, texts, CALLED, other, results(RESULT))[1]
    assert (said.role, said.content) == ("assistant", "I look.")
    assert [call.call_id for call in said.tool_calls] == ["toolu_1", "toolu_2"]


def test_results_and_questions_stay_in_order():
    """Each result is a message of its own; text beside it is the user's."""
    unknown = {**RESULT, "tool_use_id": "toolu_9"}
    given = results(RESULT, unknown, block("Well?"), block("And?"))
    said = messages_of(HELLO, CALLED, given, HELLO)
    assert said[2:] == (
        Message("tool", "Found.", tool_call_id="toolu_1", name="look_up"),
        Message("tool", "Found.", tool_call_id="toolu_9"),
        Message("user", "Well?\n\nAnd?\n\nHello"),
    )


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"content": [block("One."), block("Two.", cache_control=KEPT)]}, "One.\n\nTwo."),
        ({"content": None}, ""),
        ({"content": [], "is_error": True}, "error"),
        ({"content": "No such word.", "is_error": True}, "No such word."),
        ({"content": "", "is_error": False, "cache_control": KEPT}, ""),
    ],
)
def test_the_text_of_a_result(members, text):
    """Only text; an error without text says that it is one."""
    said = messages_of(HELLO, CALLED, results({**RESULT, **members}))
    assert said[-1] == Message("tool", text, tool_call_id="toolu_1", name="look_up")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, (ChoiceKind.AUTO, "", None)),
        ({"type": "auto"}, (ChoiceKind.AUTO, "", None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, (ChoiceKind.AUTO, "", 1)),
        ({"type": "any"}, (ChoiceKind.REQUIRED, "", None)),
        ({"type": "tool", "name": "look_up"}, (ChoiceKind.REQUIRED, "look_up", None)),
        ({"type": "none"}, (ChoiceKind.NONE, "", None)),
    ],
)
def test_tools_and_tool_choice(choice, expected):
    """Members about calling and caching elsewhere change nothing."""
    more = {"type": "custom", "strict": True, "cache_control": KEPT, "defer_loading": False}
    tools = [{**LOOK_UP, "description": "Look it up."}, {"name": "b", "input_schema": {}, **more}]
    body = decode(MessagesBody, {**PLAIN, "tools": tools, "tool_choice": choice})
    offered = (Tool("look_up", "Look it up.", {"type": "object"}), Tool("b", is_strict=True))
    assert body.tool_use == ToolUse(offered, *expected)
    assert body.cache_ttl == "1h"


def test_requests_for_no_tools_are_accepted():
    """What asks for none is taken."""
    for members in ({}, {"tools": []}, {"tool_choice": {"type": "none"}}):
        assert decode(MessagesBody, {**PLAIN, **members}).tool_use.callable_tools == ()


def test_the_number_of_blocks_in_results_is_limited():
    """They count with those of the messages: nested lists do not evade the limit."""
    few, many = ([block("x")] * number for number in (2, MAX_PARTS))
    assert messages_of(HELLO, CALLED, results({**RESULT, "content": few}))
    with pytest.raises(RequestError, match="parts of content"):
        messages_of(HELLO, CALLED, results({**RESULT, "content": many}))


@pytest.mark.parametrize(
    ("members", "ttl"),
    [
        ({}, ""),
        ({"cache_control": {"type": "ephemeral"}}, "5m"),
        ({"system": [block("a", cache_control={"type": "ephemeral", "ttl": "1h"})]}, "1h"),
        (
            {
                "cache_control": {"type": "ephemeral", "ttl": "5m"},
                "messages": [
                    {
                        "role": "user",
                        "content": [block("a", cache_control={"type": "ephemeral", "ttl": "1h"})],
                    }
                ],
            },
            "1h",
        ),
    ],
)
def test_the_retention_of_a_prompt(members, ttl):
    """The longest of all breakpoints counts."""
    assert decode(MessagesBody, {**PLAIN, **members}).cache_ttl == ttl


HOUR, MINUTES = ({"type": "ephemeral", "ttl": ttl} for ttl in ("1h", "5m"))


@pytest.mark.parametrize(
    ("members", "retention"),
    [
        ({}, Retention()),
        ({"cache_control": {"type": "ephemeral"}}, Retention(300, 0)),
        ({"tools": [{**LOOK_UP, "cache_control": HOUR}]}, Retention(0, 3600)),
        ({"system": [block("a", cache_control=MINUTES), block("b")]}, Retention(0, 300)),
        (
            {
                "tools": [{**LOOK_UP, "cache_control": HOUR}],
                "system": [block("a", cache_control=MINUTES)],
                "messages": [
                    {"role": "user", "content": [block("a", cache_control=HOUR)]},
                    {"role": "assistant", "content": [block("b", cache_control=MINUTES)]},
                    HELLO,
                ],
            },
            Retention(3600, 3600),
        ),
        (
            {
                "cache_control": MINUTES,
                "system": [block("a", cache_control=HOUR)],
            },
            Retention(300, 3600),
        ),
    ],
)
def test_what_is_retained_for_how_long(members, retention):
    """Tools and system for other conversations, too; messages for this one."""
    assert decode(MessagesBody, {**PLAIN, **members}).retention == retention


@pytest.mark.parametrize(
    ("members", "param", "kind"),
    [
        ({"max_tokens": None}, "max_tokens", RequestError),
        ({"max_tokens": 0}, "max_tokens", RequestError),
        ({"temperature": 1.5}, "temperature", RequestError),
        ({"messages": []}, "messages", RequestError),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", RequestError),
        ({"messages": [{"content": "x"}]}, "messages[0].role", RequestError),
        ({"messages": [{"role": "user"}]}, "messages[0].content", RequestError),
        ({"system": 5}, "system", RequestError),
        ({"stop_sequences": "###,"}, "", None),
        ({"stop_sequences": [5]}, "stop_sequences", RequestError),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl", RequestError),
        ({"tools": LOOK_UP}, "tools", RequestError),
        ({"tools": ["look_up"]}, "tools[0]", RequestError),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", RequestError),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name", RequestError),
        ({"tools": [{**LOOK_UP, "name": "a b"}]}, "tools[0].name", RequestError),
        ({"tools": [{**LOOK_UP, "input_schema": DEEP}]}, "tools[0].input_schema", RequestError),
        ({"tools": [{**LOOK_UP, "parameters": {}}]}, "tools[0].parameters", UnknownParameterError),
        (
            {"tools": [{"type": "web_search_20260318", "name": "web_search"}]},
            "tools[0].type",
            UnsupportedValueError,
        ),
        (
            {"tools": [{**LOOK_UP, "allowed_callers": ["code_execution_20260521"]}]},
            "tools[0].allowed_callers",
            UnsupportedValueError,
        ),
        ({"tools": [LOOK_UP, LOOK_UP]}, "tools", RequestError),
        ({"tool_choice": "any", "tools": [LOOK_UP]}, "tool_choice", RequestError),
        ({"tool_choice": {"type": "any"}}, "tool_choice", RequestError),
        ({"tool_choice": {}, "tools": [LOOK_UP]}, "tool_choice.type", RequestError),
        ({"tool_choice": {"type": "tool"}, "tools": [LOOK_UP]}, "tool_choice.name", RequestError),
        (
            {"tool_choice": {"type": "any", "name": "look_up"}, "tools": [LOOK_UP]},
            "tool_choice.name",
            RequestError,
        ),
        (
            {"tool_choice": {"type": "tool", "name": "f"}, "tools": [LOOK_UP]},
            "tool_choice.name",
            RequestError,
        ),
        ({"mcp_servers": [{"name": "a"}]}, "mcp_servers", UnsupportedValueError),
        ({"thread": {"type": "create"}}, "thread", UnsupportedValueError),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
            RequestError,
        ),
        ({"min_tokens": 1}, "min_tokens", UnknownParameterError),
        ({"stop_token_ids": [5]}, "stop_token_ids", UnknownParameterError),
        ({"frequency_penalty": 1}, "frequency_penalty", UnknownParameterError),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type",
            UnsupportedValueError,
        ),
        ({"messages": [HELLO, CALLED]}, "messages", UnsupportedValueError),
        ({"thinking": {"type": "off"}}, "thinking.type", RequestError),
        ({"thinking": {"type": "enabled", "depth": 3}}, "thinking.depth", UnknownParameterError),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", RequestError),
    ],
)
def test_refused_bodies(members, param, kind):
    """With the path of the wrong value; a missing one is reported as such."""
    given = {**PLAIN, **members}
    if kind is None:
        assert decode(MessagesBody, given).stop == ["###,"]
        return
    with pytest.raises(kind) as refused:
        decode(MessagesBody, given)
    assert refused.value.param == param
    assert type(refused.value) is kind


@pytest.mark.parametrize(
    ("message", "param", "kind"),
    [
        (results(CALL), "content[0].type", RequestError),
        ({"role": "assistant", "content": [block("a"), RESULT]}, "content[1].type", RequestError),
        ({"role": "system", "content": [RESULT]}, "content[0].type", RequestError),
        (results({"type": "thinking"}), "content[0].type", RequestError),
        (results({**RESULT, "tool_use_id": None}), "content[0].tool_use_id", RequestError),
        (results({**RESULT, "tool_use_id": ""}), "content[0].tool_use_id", RequestError),
        (results({**RESULT, "is_error": "no"}), "content[0].is_error", RequestError),
        (results({**RESULT, "content": {}}), "content[0].content", RequestError),
        (
            results({**RESULT, "content": [{"type": "image"}]}),
            "content[0].content[0].type",
            UnsupportedValueError,
        ),
        (
            results({**RESULT, "content": [RESULT]}),
            "content[0].content[0].type",
            UnsupportedValueError,
        ),
        (results({**RESULT, "output": "x"}), "content[0].output", UnknownParameterError),
        ({"role": "assistant", "content": [{**CALL, "id": 5}]}, "content[0].id", RequestError),
        ({"role": "assistant", "content": [{**CALL, "name": ""}]}, "content[0].name", RequestError),
        (
            {"role": "assistant", "content": [{**CALL, "input": None}]},
            "content[0].input",
            RequestError,
        ),
        (
            {"role": "assistant", "content": [{**CALL, "input": "{}"}]},
            "content[0].input",
            RequestError,
        ),
        (
            {"role": "assistant", "content": [{**CALL, "input": DEEP}]},
            "content[0].input",
            RequestError,
        ),
        (
            {"role": "assistant", "content": [{"type": "server_tool_use", "id": "a"}]},
            "content[0].type",
            UnsupportedValueError,
        ),
        (results({"text": "no type"}), "content[0].type", UnsupportedValueError),
        (results({"type": ["text"]}), "content[0].type", UnsupportedValueError),
        (results("x"), "content[0]", RequestError),
    ],
)
def test_refused_blocks(message, param, kind):
    """The path has no type of a block."""
    with pytest.raises(kind) as refused:
        messages_of(HELLO, CALLED, message, HELLO)
    assert refused.value.param == f"messages[2].{param}"
    assert type(refused.value) is kind
    assert refused.value.remedy


def test_counting_tokens_needs_no_max_tokens():
    """Nothing is generated; members about the answer are allowed."""
    given = {key: value for key, value in PLAIN.items() if key != "max_tokens"}
    body = decode(PromptBody, {**given, "thinking": {"type": "adaptive"}})
    assert body.conversation == (Message("user", "Hello"),)
    assert body.sampling(1.0) == {"temperature": 1.0, "stop": (), "ignore_eos": False}
