"""Bodies of chats, and their answers, parsed by the official client's types."""

from dataclasses import replace

import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from inference_svc.core.chat import Message
from inference_svc.core.errors import SessionBusyError
from inference_svc.core.retention import Retention
from inference_svc.core.turn_record import AnswerToken
from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.bodies.body import decode
from inference_svc.http_api.bodies.conversation import MAX_MESSAGES
from inference_svc.http_api.errors import RequestError, UnknownParameterError, UnsupportedValueError
from inference_svc.http_api.openai.chats import ChatBody, ChatChoice
from inference_svc.http_api.openai.choices import Choices, Envelope, shown_usage
from tests.inference_svc.http_api.as_clients_read import (
    TOKENS,
    USAGE,
    Letters,
    ScriptedAnswer,
    make_finished,
    strict,
)
from tests.inference_svc.http_api.scripted_calls import READING, calling
from tests.inference_svc.http_api.scripted_calls import TOKENS as CALL_TOKENS

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields):
    return decode(ChatBody, {"model": "m", "messages": HELLO, **fields})


def test_a_prediction_has_all_of_its_texts():
    """As a string or as parts; most chats have none."""
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "kept."}]
    assert chat(prediction={"type": "content", "content": parts}).predicted == "It is kept."
    assert chat(prediction={"type": "content", "content": "Kept."}).predicted == "Kept."
    assert chat(prediction=None).predicted == chat().predicted == ""


def test_a_plain_chat():
    """Omitted members have OpenAI's defaults."""
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
        frequency_penalty=0.5,
        presence_penalty=-2,
        logit_bias={"5": -100, "0": 0.5},
        stop_token_ids=[7],
        min_tokens=2,
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
        "frequency_penalty": 0.5,
        "presence_penalty": -2,
        "logit_bias": {5: -100, 0: 0.5},
        "stop_token_ids": (7,),
        "min_tokens": 2,
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


def test_the_default_temperature_comes_from_the_settings():
    """A request's own has precedence, also 0."""
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
def test_contents_are_read(content, expected):
    """A string, or text parts."""
    body = chat(messages=[{"role": "user", "content": content}])
    assert body.conversation == (Message("user", expected),)


def test_roles_are_read():
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
    ("fields", "session_s"),
    [
        ({}, 0),
        ({"prompt_cache_options": {}}, 1800),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "1h"}}, 3600),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "in-memory", "prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}, 86_400),
    ],
)
def test_the_retention_of_a_chat(fields, session_s):
    """From its options, or from the older parameter: the longer of both; none by default."""
    assert chat(**fields).retention == Retention(session_s)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": "30m"}, "prompt_cache_options"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "0s"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "366d"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": 1800}}, "prompt_cache_options.ttl"),
    ],
)
def test_invalid_times_are_refused(fields, param):
    """With their path, and the remedy."""
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.remedy.startswith("send ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": [{"role": "function", "name": "f", "content": "4"}]}, "messages[0].role"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_unsupported_members_are_refused(fields, param):
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
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"presence_penalty": True}, "presence_penalty"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"Hello": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 11: 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias[5]"),
        ({"logit_bias": {"5": "much"}}, "logit_bias[5]"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]"),
        ({"min_tokens": -1}, "min_tokens"),
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
def test_invalid_values(fields, param):
    """The path of the first one is reported."""
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_an_unknown_parameter_is_refused():
    """Also inside messages."""
    with pytest.raises(UnknownParameterError, match="max_token'"):
        chat(max_token=5)
    with pytest.raises(UnknownParameterError, match=r"messages\[0\].rol"):
        chat(messages=[{"role": "user", "content": "x", "roll": 1}])


# ------------------------------------------------------------------------------------ answers


def reply_of(*answers, n=1, includes_usage=False, top_logprobs=None, reading=None):
    """Return the reply with these answers to one request."""
    envelope = Envelope(
        kind="chat.completion",
        chunk_kind="chat.completion.chunk",
        answer_id="chatcmpl-1",
        created=5,
        model="tiny",
        fingerprint="f" * 64,
        includes_usage=includes_usage,
    )
    tokens = TokenText(Letters())

    def choices():
        return [
            ChatChoice(index, tokens, reading or Reading(), top_logprobs)
            for index in range(len(answers))
        ]

    return Choices(envelope, answers, choices, n)


async def whole(*answers, **options):
    return strict(ChatCompletion, await reply_of(*answers, **options).whole())


async def chunks_of(*answers, **options):
    events = reply_of(*answers, **options).events()
    return [strict(ChatCompletionChunk, event) async for event in events]


async def test_a_whole_chat_answer():
    """The client parses it: text, reason, usage and session."""
    answer = await whole(ScriptedAnswer(TOKENS, make_finished("length")))
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens_details.cached_tokens == 28
    assert answer.model_extra["session_id"] == "s-1"


def test_usage_counts_every_prompt_token_once():
    """History, recomputed or not, and new tokens."""
    usage = strict(CompletionUsage, shown_usage(USAGE))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (35, 0, 35)


async def test_drafts_of_all_answers_are_counted():
    """Accepted and rejected ones; without drafts there are no counts."""
    ended = make_finished()
    drafted = replace(ended, usage=replace(ended.usage, drafted_tokens=9, accepted_tokens=7))
    for answers, counts in (([drafted, drafted], (14, 4)), ([ended], (0, 0))):
        scripted = [ScriptedAnswer(TOKENS, each) for each in answers]
        usage = (await whole(*scripted, n=len(scripted))).usage
        details = usage.completion_tokens_details
        found = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert found == counts
        assert usage.completion_tokens == 2 * len(scripted)


async def test_logprobs_are_told_with_text_and_bytes():
    """A piece of a character has its own bytes."""
    answer = await whole(ScriptedAnswer(TOKENS, make_finished()), top_logprobs=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("He", -0.5, [72, 101])
    assert [top.token for top in first.top_logprobs] == ["He", "\ufffd"]
    assert second.bytes == list("é".encode()[:1])
    assert second.top_logprobs[1].bytes == list("é".encode())


async def test_no_alternatives_unless_requested():
    """Only the token itself is shown."""
    answer = await whole(ScriptedAnswer(TOKENS, make_finished()), top_logprobs=0)
    assert [row.top_logprobs for row in answer.choices[0].logprobs.content] == [[], []]


async def test_the_chunks_of_a_stream():
    """They add up to the answer; the usage comes last, in a chunk without choices."""
    chunks = await chunks_of(ScriptedAnswer(TOKENS, make_finished()), includes_usage=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 2)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_without_usage_has_none():
    """Unless the client asks for it."""
    chunks = await chunks_of(ScriptedAnswer(TOKENS, make_finished()))
    assert {chunk.usage for chunk in chunks} == {None}


def test_tokens_without_text_make_no_chunk():
    """A piece of a character waits for the rest."""
    assert not list(ChatChoice(0, TokenText(Letters()), Reading()).piece([AnswerToken(2, "")]))
    assert list(ChatChoice(0, TokenText(Letters()), Reading(), 0).piece([AnswerToken(2, "", -1.0)]))


# ------------------------------------------------------------------------------ several answers


async def test_several_answers_are_choices_of_one_object():
    """Each with its index and session; the prompt counts once, sampled tokens each time."""
    answers = [ScriptedAnswer(TOKENS, make_finished(), f"s-{number}") for number in range(4)]
    answer = await whole(*answers, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.model_extra["session_id"] for choice in answer.choices] == [
        "s-0",
        "s-1",
        "s-2",
        "s-3",
    ]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (2 * 35, 4 * 2)


async def test_the_chunks_of_several_answers_are_interleaved():
    """Those of each in order, under its index; the usage is the total."""
    answers = [ScriptedAnswer(TOKENS, make_finished(), f"s-{number}") for number in range(3)]
    *chunks, last = await chunks_of(*answers, n=3, includes_usage=True)
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in own) == "Hello"
        assert own[-1].choices[0].finish_reason == "stop"
        assert {chunk.model_extra["session_id"] for chunk in own} == {f"s-{index}"}
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (35, 6)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_if_one_of_several_answers_fails_all_do(is_stream):
    """The others end."""
    others = [ScriptedAnswer(TOKENS, None), ScriptedAnswer(TOKENS, None)]
    answers = [others[0], ScriptedAnswer(TOKENS, SessionBusyError("busy", "wait")), others[1]]
    with pytest.raises(SessionBusyError):
        await (chunks_of(*answers, n=3) if is_stream else whole(*answers, n=3))
    assert all(other.is_cancelled for other in others)


def test_the_number_of_answers_is_limited():
    """Each is drawn with a seed of its own."""
    assert chat(n=16).n == 16
    for fields in ({"n": 0}, {"n": 17}, {"n": "2"}):
        with pytest.raises(RequestError):
            chat(**fields)
    seeds = [chat(n=3, seed=2**63 - 1).sampling(0.0, choice)["seed"] for choice in range(3)]
    assert seeds == [2**63 - 1, 0, 1]


async def test_the_chunks_of_calls():
    """Each call begins with its id and name, followed by its arguments; a whole one is equal."""
    answers = [ScriptedAnswer(CALL_TOKENS, calling()) for _ in range(2)]
    reading = {"reading": READING}
    answer = await whole(answers[0], **reading)
    chunks = await chunks_of(answers[1], **reading)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.model_extra["reasoning_content"] == "Two words."
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    thought = [delta.model_extra.get("reasoning_content", "") for delta in deltas]
    assert "".join(thought) == "Two words."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.index for part in parts] == [0, 0, 1, 1]
    assert [
        (begun.id, begun.function.name, begun.function.arguments + rest.function.arguments)
        for begun, rest in zip(parts[::2], parts[1::2], strict=True)
    ] == [
        (call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_an_answer_cut_behind_a_call():
    """The client learns that it was cut."""
    answer = await whole(ScriptedAnswer(CALL_TOKENS, calling("length")), reading=READING)
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].message.tool_calls) == 2
