"""Bodies of responses, decoded."""

import pytest

from inference_svc.core.chat import Message
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.errors import RequestError
from inference_svc.http_api.openai.responses.response_body import ResponseBody


def response(**fields):
    return decode(ResponseBody, {"model": "m", "input": "Hello", **fields})


def test_a_plain_response():
    """A text is a user's message, after the instructions."""
    body = response(instructions="Be brief.")
    assert body.conversation == (Message("system", "Be brief."), Message("user", "Hello"))
    assert body.new_messages == (Message("user", "Hello"),)
    assert body.shown_logprobs is None


def test_a_response_continues_with_returned_items():
    """Clients send output items as they got them."""
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Yes?", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "user", "content": "More"},
    ]
    assert [m.content for m in response(input=given).conversation] == ["Hi", "Yes?", "More"]


def test_a_response_of_a_conversation():
    """By its id, or an object with it; a conversation's items suffice as input."""
    for given in ("conv_1", {"id": "conv_1"}):
        for options in ({}, {"input": []}, {"input": None}):
            assert response(conversation=given, **options).conversation_id == "conv_1"
    assert response(conversation=None).conversation_id == ""
    assert response(conversation="conv_1", input=[]).new_messages == ()


def test_every_parameter_of_a_response():
    """Each of them is stored or reaches the turn."""
    body = response(
        max_output_tokens=5,
        previous_response_id="resp_1",
        metadata={"a": "b"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        truncation="disabled",
        text={"format": {"type": "text"}},
        background=False,
        reasoning={},
        parallel_tool_calls=True,
    )
    assert body.previous_response_id == "resp_1"
    assert body.sampling(1.0)["max_tokens"] == 5
    assert (body.shown_logprobs, body.overflow("oldest")) == (2, "reject")
    assert body.metadata == {"a": "b"}


@pytest.mark.parametrize(
    ("truncation", "default", "policy"),
    [
        ({}, "reject", ""),
        ({"truncation": "auto"}, "reject", "oldest"),
        ({"truncation": "auto"}, "sinks", ""),
        ({"truncation": "disabled"}, "sinks", "reject"),
    ],
)
def test_truncation_is_an_overflow_policy(truncation, default, policy):
    """OpenAI's values; the service's default needs none."""
    assert response(**truncation).overflow(default) == policy


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "4"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "["}]},
            None,
        ),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "top_logprobs": 1}, "background"),
        ({"conversation": ""}, "conversation"),
        ({"conversation": {"id": "conv_1", "name": "a"}}, "conversation"),
        ({"conversation": ["conv_1"]}, "conversation"),
        ({"conversation": "conv_1", "session_id": "s"}, "conversation"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"include": [[]]}, "include"),
        ({"truncation": "maybe"}, "truncation"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"previous_response_id": "resp_1", "session_id": "s"}, "previous_response_id"),
    ],
)
def test_unsupported_members_are_refused(fields, param):
    """By name, and with a remedy."""
    with pytest.raises(RequestError) as refused:
        response(**fields)
    assert refused.value.remedy
    assert param is None or refused.value.param == param
