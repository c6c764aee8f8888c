"""Bodies of both APIs, decoded."""

import pytest

from inference_svc.openai.chat_request import decode_chat
from inference_svc.openai.errors import RequestError, UnknownParameterError, UnsupportedValueError
from inference_svc.openai.messages import MAX_MESSAGES, Message
from inference_svc.openai.response_request import decode_response

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields):
    return decode_chat({"model": "m", "messages": HELLO, **fields}, 1.0)


def response(**fields):
    return decode_response({"model": "m", "input": "Hello", **fields}, 1.0)


def test_a_plain_chat():
    """What is not said is OpenAI's default."""
    request = chat()
    asked = request.asked
    assert (asked.model, asked.messages) == ("m", (Message("user", "Hello"),))
    assert asked.sampling.temperature == 1.0
    assert not asked.sampling.HasField("max_tokens")
    assert (asked.is_streamed, request.includes_usage, asked.session_id) == (False, False, "")
    assert asked.is_kept
    assert asked.top_logprobs is None


def test_every_parameter_of_a_chat():
    """Each of them reaches the turn."""
    asked = chat(
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
    ).asked
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == (2**63 - 1, 9, 3)
    assert (list(sampling.stop), sampling.ignore_eos) == (["a", "b"], True)
    assert (asked.is_streamed, asked.is_kept, asked.session_id) == (True, False, "s1")
    assert asked.top_logprobs == 3


def test_logprobs_without_alternatives():
    """The engine is asked for one alternative, none is shown."""
    asked = chat(logprobs=True).asked
    assert (asked.sampling.logprobs, asked.top_logprobs) == (1, 0)


def test_the_default_temperature_is_the_settings():
    """A request's own counts more, 0 included."""
    body = {"model": "m", "messages": HELLO}
    assert decode_chat(body, 0.25).asked.sampling.temperature == 0.25
    assert decode_chat({**body, "temperature": 0}, 0.25).asked.sampling.temperature == 0


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
    asked = chat(messages=[{"role": "user", "content": content}]).asked
    assert asked.messages == (Message("user", expected),)


def test_roles():
    """A developer is the system; an answer may be empty."""
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "user", "content": "?"},
    ]
    assert [(m.role, m.content) for m in chat(messages=messages).asked.messages] == [
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
    request = response(instructions="Be brief.")
    assert request.messages == (Message("system", "Be brief."), Message("user", "Hello"))
    assert request.asked.messages == (Message("user", "Hello"),)
    assert request.asked.top_logprobs is None


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
    assert [m.content for m in response(input=given).messages] == ["Hi", "Yes?", "More"]


def test_every_parameter_of_a_response():
    """Each of them is kept or reaches the turn."""
    request = response(
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
    assert (request.previous_id, request.max_output_tokens) == ("resp_1", 5)
    assert request.asked.sampling.max_tokens == 5
    assert (request.asked.top_logprobs, request.asked.truncation) == (2, "disabled")
    assert request.metadata == {"a": "b"}


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
