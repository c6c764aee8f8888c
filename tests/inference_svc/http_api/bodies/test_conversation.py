"""What requests give to the chat template, in every API."""

import pytest

from inference_svc.core.chat import Message
from inference_svc.core.submission import MAX_NAME
from inference_svc.http_api.anthropic.bodies import MessagesBody, PromptBody
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.errors import RequestError, UnsupportedValueError
from inference_svc.http_api.openai.chats import ChatBody
from inference_svc.http_api.openai.completions import CompletionBody
from inference_svc.http_api.openai.responses.response_body import ResponseBody
from inference_svc.http_api.tokens import TokenizeBody

HELLO = {"role": "user", "content": "Hello"}
BEGUN = {"role": "assistant", "content": "Well, "}
CALLS = {
    **BEGUN,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
STYLE = {"chat_template_kwargs": {"style": "x"}}
UNTHINKING = {"enable_thinking": False, "thinking": False}


def chat(*messages, **fields):
    return decode(ChatBody, {"model": "m", "messages": [*messages] or [HELLO], **fields})


def message(*messages, **fields):
    given = {"model": "m", "max_tokens": 5, "messages": [*messages] or [HELLO], **fields}
    return decode(MessagesBody, given)


def response(**fields):
    return decode(ResponseBody, {"model": "m", "input": "Hello", **fields})


def test_template_arguments_are_read():
    """By their own names in every API with messages; raw text has none."""
    for body in (chat(**STYLE), message(**STYLE), response(**STYLE)):
        assert body.template_arguments == {"style": "x"}
    assert chat().template_arguments == message().template_arguments == {}
    body = decode(TokenizeBody, {"messages": [HELLO], **STYLE})
    assert body.input.arguments == {"style": "x"}
    assert decode(CompletionBody, {"model": "m", "prompt": "a"}).template_arguments == {}
    with pytest.raises(RequestError) as refused:
        decode(CompletionBody, {"model": "m", "prompt": "a", **STYLE})
    assert refused.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("make", [chat, message, response])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"messages": []}, "argument 'messages': leave it out"),
        ({"x": [[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]}, "nested too deeply"),
        ("style", "is not valid: send an object"),
        ([1], "is not valid: send an object"),
    ],
)
def test_invalid_template_arguments(make, given, said):
    """In one line, with the path and a remedy."""
    with pytest.raises(RequestError, match=said) as refused:
        make(chat_template_kwargs=given)
    assert refused.value.param == "chat_template_kwargs"


def test_reasoning_effort():
    """It is an argument of the template; an explicit one has precedence."""
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        said = {"reasoning_effort": effort}
        assert chat(reasoning_effort=effort).template_arguments == said
        assert response(reasoning={"effort": effort}).template_arguments == said
    off = {"reasoning_effort": "none", **UNTHINKING}
    assert chat(reasoning_effort="none").template_arguments == off
    assert response(reasoning={"effort": "none"}).template_arguments == off
    own = chat(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert own.template_arguments == {**off, "enable_thinking": True}
    assert response(reasoning={"summary": "auto"}).template_arguments == {}
    for make, fields in (
        (chat, {"reasoning_effort": "much"}),
        (response, {"reasoning": {"effort": "much"}}),
    ):
        with pytest.raises(RequestError, match="is not valid: send 'none', 'minimal'"):
            make(**fields)


def test_thinking_can_be_disabled_by_anthropics_clients():
    """Its other members change nothing."""
    assert message(thinking={"type": "disabled"}).template_arguments == UNTHINKING
    for kind in ("enabled", "adaptive"):
        assert message(thinking={"type": kind, "budget_tokens": 9}).template_arguments == {}
    named = message(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": True})
    assert named.template_arguments == {"enable_thinking": False, "thinking": True}


def test_a_chat_may_continue_an_answer():
    """If requested; otherwise the answer is one of its messages."""
    for fields in ({}, {"add_generation_prompt": None}, {"add_generation_prompt": False}):
        body = chat(HELLO, BEGUN, continue_final_message=True, **fields)
        assert body.conversation == (Message("user", "Hello"),)
        assert body.beginning == "Well, "
    body = chat(HELLO, BEGUN, add_generation_prompt=True)
    assert (len(body.conversation), body.beginning) == (2, "")
    nothing = chat(HELLO, {**BEGUN, "content": ""}, continue_final_message=True)
    assert (len(nothing.conversation), nothing.beginning) == (1, "")


@pytest.mark.parametrize(
    ("messages", "fields", "param", "kind"),
    [
        ([HELLO], {"continue_final_message": True}, "messages", RequestError),
        ([HELLO, CALLS], {"continue_final_message": True}, "messages", UnsupportedValueError),
        (
            [HELLO, BEGUN],
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            RequestError,
        ),
        (
            [HELLO],
            {"add_generation_prompt": False},
            "add_generation_prompt",
            UnsupportedValueError,
        ),
    ],
)
def test_endings_that_no_answer_can_follow(messages, fields, param, kind):
    """In one line, with the remedy."""
    with pytest.raises(kind) as refused:
        chat(*messages, **fields)
    assert (type(refused.value), refused.value.param) == (kind, param)
    assert refused.value.remedy


def test_anthropics_clients_continue_an_answer_at_the_end():
    """Of any blocks but calls; blocks and messages of an answer are joined as usual."""
    body = message(HELLO, BEGUN)
    assert (body.conversation, body.beginning) == ((Message("user", "Hello"),), "Well, ")
    blocks = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "A"}]
    body = message(HELLO, BEGUN, HELLO, {**BEGUN, "content": blocks}, {**BEGUN, "content": "B"})
    assert [one.role for one in body.conversation] == ["user", "assistant", "user"]
    assert body.beginning == "A\n\nB"
    for content in ("", []):
        body = message(HELLO, {**BEGUN, "content": content})
        assert (len(body.conversation), body.beginning) == (1, "")
    assert message(HELLO, BEGUN, HELLO).beginning == ""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    with pytest.raises(UnsupportedValueError, match="an answer that calls tools"):
        message(HELLO, {**BEGUN, "content": [call]})
    assert decode(PromptBody, {"model": "m", "messages": [HELLO, BEGUN]}).beginning == "Well, "


def test_counted_messages_end_as_requested():
    """With a prompt for an answer, or without, or with its beginning."""
    given = {"messages": [HELLO, BEGUN]}
    asked = decode(TokenizeBody, given).input
    assert (len(asked.messages), asked.beginning, asked.is_prompt) == (2, "", True)
    asked = decode(TokenizeBody, {**given, "add_generation_prompt": False}).input
    assert (len(asked.messages), asked.beginning, asked.is_prompt) == (2, "", False)
    begun = {**given, "add_generation_prompt": False, "continue_final_message": True}
    asked = decode(TokenizeBody, begun).input
    assert (len(asked.messages), asked.beginning) == (1, "Well, ")
    for wrong in (
        {**begun, "add_generation_prompt": True},
        {"prompt": "a", "continue_final_message": True},
    ):
        with pytest.raises(RequestError) as refused:
            decode(TokenizeBody, wrong)
        assert refused.value.param == "continue_final_message"


def test_a_message_may_have_a_name():
    """On one line of limited length."""
    for role in ("system", "developer", "user", "assistant"):
        body = chat({"role": role, "content": "a", "name": "Ann Ä."})
        assert body.conversation[0].name == "Ann Ä."
        assert body.conversation[0].as_template()["name"] == "Ann Ä."
    assert "name" not in chat().conversation[0].as_template()
    for name in ("x" * (MAX_NAME + 1), "a\nb", "\x00"):
        with pytest.raises(
            RequestError, match="is not a valid name of a message's author"
        ) as refused:
            chat({**HELLO, "name": name})
        assert refused.value.param == "messages[0].name"
    assert chat({**HELLO, "name": "x" * MAX_NAME}).conversation[0].name
