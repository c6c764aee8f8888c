"""Bodies of both APIs, decoded."""

import pytest

from inference_svc.openai.bodies import decode
from inference_svc.openai.chats import ChatBody
from inference_svc.openai.errors import RequestError, UnknownParameterError, UnsupportedValueError
from inference_svc.openai.messages import MAX_MESSAGES, Message
from inference_svc.openai.responses import ResponseBody

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields):
    return decode(ChatBody, {"model": "m", "messages": HELLO, **fields})


def response(**fields):
    return decode(ResponseBody, {"model": "m", "input": "Hello", **fields})


def test_a_plain_chat():
    """What is not said is OpenAI's default."""
    body = chat()
    assert (body.model, body.conversation) == ("m", (Message("user", "Hello"),))
    assert body.sampling(1.0) == {"temperature": 1.0, "stop": (), "ignore_eos": False}
    assert (body.stream, body.stream_options.include_usage, body.session_id) == (False, False, "")
    assert body.store
    assert body.shown_logprobs is None


def test_every_parameter_of_a_chat():
    """Each of them reaches the turn."""
    body = chat(
        temperature=0.5,
        top_p=0.25,
        top_k=5,
        min_p=0.125,
        repetition_penalty=1.5,
        seed=-1,
        max_tokens=7,
        max_completion_tokens=9,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
        store=False,
        session_id="s1",
        ignore_eos=True,
        user="me",
        metadata={"a": "b"},
        n=1,
        tools=[],
        response_format={"type": "text"},
    )
    assert body.sampling(1.0) == {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "seed": 2**63 - 1,
        "max_tokens": 9,
        "logprobs": 3,
        "stop": ("a", "b"),
        "ignore_eos": True,
    }
    assert (body.stream, body.store, body.session_id) == (True, False, "s1")
    assert body.stream_options.include_usage
    assert body.shown_logprobs == 3
    assert body.metadata == {"a": "b"}


def test_logprobs_without_alternatives():
    """The engine is asked for one alternative, none is shown."""
    body = chat(logprobs=True)
    assert (body.sampling(1.0)["logprobs"], body.shown_logprobs) == (1, 0)


def test_the_default_temperature_is_the_settings():
    """A request's own counts more, 0 included."""
    assert chat().sampling(0.25)["temperature"] == 0.25
    assert chat(temperature=0).sampling(0.25)["temperature"] == 0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("", ""),
    ],
)
def test_contents(content, expected):
    """A string, or text parts."""
    body = chat(messages=[{"role": "user", "content": content}])
    assert body.conversation == (Message("user", expected),)


def test_roles():
    """A developer is the system; an answer may be empty."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "user", "content": "?"},
    ]
    assert [(m.role, m.content) for m in chat(messages=messages).conversation] == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", ""),
        ("user", "?"),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_what_a_chat_cannot_have_is_refused(fields, param):
    """By name, and with a remedy: nothing is ignored silently."""
    with pytest.raises(UnsupportedValueError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": HELLO * (MAX_MESSAGES + 1)}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 5}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ],
)
def test_values_that_are_off(fields, param):
    """The path of the first one is told."""
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_an_unknown_parameter_is_refused():
    """Also inside messages."""
    with pytest.raises(UnknownParameterError, match="max_token'"):
        chat(max_token=5)
    with pytest.raises(UnknownParameterError, match=r"messages\[0\].rol"):
        chat(messages=[{"role": "user", "content": "x", "roll": 1}])


def test_a_plain_response():
    """A text is a user's message, instructions come before it."""
    body = response(instructions="Be brief.")
    assert body.conversation == (Message("system", "Be brief."), Message("user", "Hello"))
    assert body.new_messages == (Message("user", "Hello"),)
    assert body.shown_logprobs is None


def test_a_response_goes_on_with_items_that_came_back():
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


def test_every_parameter_of_a_response():
    """Each of them is kept or reaches the turn."""
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
    """OpenAI's words; what the service does anyway is not named."""
    assert response(**truncation).overflow(default) == policy


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "output": "4"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "maybe"}, "truncation"),
        ({"previous_response_id": "resp_1", "session_id": "s"}, "previous_response_id"),
    ],
)
def test_what_a_response_cannot_have_is_refused(fields, param):
    """By name, and with a remedy."""
    with pytest.raises(RequestError) as refused:
        response(**fields)
    assert refused.value.remedy
    assert param is None or refused.value.param == param
