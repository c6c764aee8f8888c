"""Bodies of /v1/messages: what a conversation is made of, and what is refused."""

import pytest

from inference_svc.core.chat import Message
from inference_svc.http_api.anthropic.bodies import MessagesBody, PromptBody
from inference_svc.http_api.bodies import decode
from inference_svc.http_api.errors import (
    RequestError,
    UnknownParameterError,
    UnsupportedValueError,
)

HELLO = {"role": "user", "content": "Hello"}
PLAIN = {"model": "m", "max_tokens": 8, "messages": [HELLO]}


def conversation(**members):
    """Roles and texts of a body with these members."""
    said = decode(MessagesBody, {**PLAIN, **members}).conversation
    return [(message.role, message.content) for message in said]


def block(text, **members):
    return {"type": "text", "text": text, **members}


def test_a_conversation():
    """The system leads; texts and blocks are the same; blocks are paragraphs."""
    assert conversation(system="Be brief.") == [("system", "Be brief."), ("user", "Hello")]
    blocks = [block("One."), block("Two.", cache_control={"type": "ephemeral"})]
    assert conversation(system=blocks)[0] == ("system", "One.\n\nTwo.")
    given = [HELLO, {"role": "assistant", "content": [block("Hi")]}, {**HELLO, "content": blocks}]
    assert conversation(messages=given) == [
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("user", "One.\n\nTwo."),
    ]


def test_messages_of_one_role_are_one():
    """Templates want turns; a system message among the first is the system's, too."""
    late = {"role": "system", "content": "Be kind."}
    assert conversation(system="Be brief.", messages=[late, HELLO, HELLO]) == [
        ("system", "Be brief.\n\nBe kind."),
        ("user", "Hello\n\nHello"),
    ]


def test_an_empty_answer_is_one():
    """Of an answer without text clients send a message without blocks."""
    given = [HELLO, {"role": "assistant", "content": []}, HELLO]
    assert [role for role, _ in conversation(messages=given)] == ["user", "assistant", "user"]


def test_what_differs_in_each_request_is_not_read():
    """Else nothing behind it could be reused; only of the system, where clients put it."""
    header = block("x-anthropic-billing-header: cc_version=2.1.9; cch=74943;")
    assert conversation(system=[header, block("Be brief.")])[0] == ("system", "Be brief.")
    assert conversation(system=[header]) == [("user", "Hello")]
    assert conversation(messages=[{**HELLO, "content": [header]}])[0][1] == header["text"]


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
def test_how_long_a_prompt_is_wanted(members, ttl):
    """The longest of all breakpoints counts."""
    assert decode(MessagesBody, {**PLAIN, **members}).cache_ttl == ttl


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
        ({"tools": [{"name": "f"}]}, "tools", UnsupportedValueError),
        ({"tool_choice": {"type": "any"}}, "tool_choice", UnsupportedValueError),
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
        (
            {"messages": [HELLO, {"role": "assistant", "content": "I"}]},
            "messages",
            UnsupportedValueError,
        ),
    ],
)
def test_what_is_refused(members, param, kind):
    """With the path of what is off; what is not there is told as such."""
    given = {**PLAIN, **members}
    if kind is None:
        assert decode(MessagesBody, given).stop == ["###,"]
        return
    with pytest.raises(kind) as refused:
        decode(MessagesBody, given)
    assert refused.value.param == param
    assert type(refused.value) is kind


def test_what_counts_has_no_bound():
    """To count tokens nothing is answered; an answer's members do no harm."""
    given = {key: value for key, value in PLAIN.items() if key != "max_tokens"}
    body = decode(PromptBody, {**given, "thinking": {"type": "adaptive"}})
    assert body.conversation == (Message("user", "Hello"),)
    assert body.sampling(1.0) == {"temperature": 1.0, "stop": (), "ignore_eos": False}
