"""What clients get, read by the official client's own types."""

import functools

import pytest
from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from inference_svc.core.answers import AnswerToken
from inference_svc.core.errors import QueueFullError, SessionBusyError
from inference_svc.core.turn_record import Finished, Usage
from inference_svc.openai.chat_objects import ChatObjects, chat_usage
from inference_svc.openai.errors import (
    RequestError,
    RequestTooLargeError,
    SlowRequestError,
    UnknownModelNameError,
    error_headers,
    error_object,
    status_of,
)
from inference_svc.openai.event_stream import json_bytes
from inference_svc.openai.response_events import ResponseEvents
from inference_svc.openai.response_objects import ResponseFacts
from inference_svc.openai.served_model import ServedModel
from inference_svc.openai.token_text import TokenText
from shared.types.errors import ReportedError, UnauthenticatedError

USAGE = Usage(history_tokens=30, reused_tokens=28, recomputed_tokens=2, new_tokens=5)
TOKENS = [
    AnswerToken(1, "He", -0.5, ((1, -0.5), (2, -1.5))),
    AnswerToken(2, "llo", -0.25, ((2, -0.25), (0, -9.0))),
]
MODEL = ServedModel("tiny", ("gpt-4o",), "f" * 64, 1_700_000_000, 2048)
FACTS = ResponseFacts(1_700_000_000, "tiny", instructions="Be brief.", metadata={"a": "b"})


class Letters:
    """A tokenizer of three tokens; the last is a piece of a character."""

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(("é", "He", "\ufffd")[token_id] for token_id in token_ids)


def finished(reason="stop"):
    usage = Usage(history_tokens=30, reused_tokens=28, new_tokens=5, output_tokens=2)
    return Finished(reason, "Hello", usage, 3)


def objects(**fields):
    return ChatObjects("chatcmpl-1", 5, "tiny", "f" * 64, "s-1", TokenText(Letters()), **fields)


adapter = functools.cache(TypeAdapter)  # the union of all events takes a while to build


def strict(kind, data):
    """Read as the client does not: with every type checked."""
    return adapter(kind).validate_json(json_bytes(data))


def test_a_whole_chat_answer():
    """The client's type takes it, and finds text, reason, usage and session."""
    answer = strict(ChatCompletion, objects().whole(TOKENS, finished("length")))
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage.prompt_tokens_details.cached_tokens == 28
    assert answer.model_extra["session_id"] == "s-1"


def test_usage_counts_every_prompt_token_once():
    """History, computed again or not, and what is new."""
    usage = strict(CompletionUsage, chat_usage(USAGE))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (35, 0, 35)


def test_logprobs_are_told_with_text_and_bytes():
    """A piece of a character has no bytes of its own."""
    answer = strict(ChatCompletion, objects(top_logprobs=2).whole(TOKENS, finished()))
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("He", -0.5, [72, 101])
    assert [top.token for top in first.top_logprobs] == ["He", "\ufffd"]
    assert second.bytes == []
    assert second.top_logprobs[1].bytes == list("é".encode())


def test_no_alternatives_unless_asked_for():
    """The token's own is shown alone."""
    answer = strict(ChatCompletion, objects(top_logprobs=0).whole(TOKENS, finished()))
    assert [row.top_logprobs for row in answer.choices[0].logprobs.content] == [[], []]


def test_the_chunks_of_a_stream():
    """They make up the answer; the usage comes last, in a chunk without choices."""
    made = objects(includes_usage=True)
    given = [made.opening(), *map(made.piece, ([TOKENS[0]], [TOKENS[1]]))]
    chunks = [strict(ChatCompletionChunk, one) for one in (*given, *made.closing(finished()))]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 2)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_none():
    """Unless the client asks for it."""
    chunks = [strict(ChatCompletionChunk, one) for one in objects().closing(finished())]
    assert [chunk.usage for chunk in chunks] == [None]


def test_tokens_that_show_nothing_make_no_chunk():
    """A piece of a character waits for the rest."""
    assert objects().piece([AnswerToken(2, "")]) is None
    assert objects(top_logprobs=0).piece([AnswerToken(2, "", -1.0)]) is not None


@pytest.mark.parametrize(
    ("reason", "last", "status"),
    [("stop", "response.completed", "completed"), ("length", "response.incomplete", "incomplete")],
)
def test_the_events_of_a_response(reason, last, status):
    """In OpenAI's order, numbered, each of the client's type; the last one has all."""
    events = ResponseEvents("resp_1", "s-1", FACTS, TokenText(Letters()), 1)
    made = [*events.opening(), *events.piece([TOKENS[0]]), *events.piece([TOKENS[1]])]
    made += events.closing(finished(reason))
    read = [strict(ResponseStreamEvent, one) for one in made]
    assert [event.sequence_number for event in read] == list(range(len(read)))
    assert [event.type.removeprefix("response.") for event in read[:-1]] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert read[-1].type == last
    response = read[-1].response
    assert (response.status, response.output_text) == (status, "Hello")
    assert response.usage.input_tokens_details.cached_tokens == 28
    assert response.instructions == "Be brief."
    assert len(response.output[0].content[0].logprobs) == 2


def test_a_whole_response():
    """The same object as the last event's."""
    events = ResponseEvents("resp_1", "s-1", FACTS, TokenText(Letters()), None)
    response = strict(Response, events.whole(TOKENS, finished("length")))
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.id, response.metadata) == ("resp_1", {"a": "b"})
    assert response.output[0].content[0].logprobs == []


def test_a_response_that_fails_while_it_is_streamed():
    """The error is in the last event."""
    events = ResponseEvents("resp_1", "s-1", FACTS, TokenText(None), None)
    error = error_object(SessionBusyError("busy", "wait"))
    made = events.failure(error)
    assert made["type"] == "response.failed"
    assert made["response"]["status"] == "failed"
    assert made["response"]["error"] == {"code": "session_busy", "message": "busy: wait"}


def test_models():
    """The model and each alias, by every name; no other."""
    listed = [strict(Model, one) for one in MODEL.as_list()["data"]]
    assert [model.id for model in listed] == ["tiny", "gpt-4o"]
    assert strict(Model, MODEL.shown("gpt-4o")).id == "gpt-4o"
    with pytest.raises(UnknownModelNameError, match="use 'tiny'"):
        MODEL.check("gpt-5")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("x", "y", "n"), 400, "invalid_request_error", "invalid_value"),
        (UnauthenticatedError("x", "y"), 401, "invalid_request_error", "invalid_api_key"),
        (UnknownModelNameError("x", "y"), 404, "invalid_request_error", "model_not_found"),
        (SlowRequestError("x", "y"), 408, "timeout_error", "request_timeout"),
        (SessionBusyError("x", "y"), 409, "conflict_error", "session_busy"),
        (RequestTooLargeError("x", "y"), 413, "invalid_request_error", "request_too_large"),
        (
            QueueFullError("x", "y", queue_length=3, retry_after_s=0.25),
            429,
            "rate_limit_error",
            "queue_full",
        ),
        (ReportedError("x", "y"), 500, "server_error", "error"),
    ],
)
def test_errors_as_openai_writes_them(error, status, kind, code):
    """Status and object; the message has the remedy."""
    assert status_of(error) == status
    written = error_object(error)
    assert (written["type"], written["code"]) == (kind, code)
    assert written["message"] == "x: y"
    assert written["param"] == ("n" if isinstance(error, RequestError) else None)


def test_when_to_come_back():
    """In whole seconds for everybody, in milliseconds for OpenAI's clients."""
    error = QueueFullError("x", "y", queue_length=3, retry_after_s=0.25)
    headers = error_headers(error)
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("1", "250")
    assert headers["x-should-retry"] == "true"
    assert error_headers(RequestError("x", "y"))["x-should-retry"] == "false"
