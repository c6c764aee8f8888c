"""Messages and their events, as the official client reads them."""

from dataclasses import replace

import pytest
from anthropic.types import Message, RawMessageStreamEvent

from inference_svc.core.answers import AnswerToken
from inference_svc.core.errors import SessionBusyError
from inference_svc.http_api.anthropic.message_objects import MessageObjects
from tests.inference_svc.http_api.as_clients_read import STARTED, TOKENS, finished, strict


def objects(cache_ttl="", max_tokens=2):
    return MessageObjects("msg_1", "s-1", "tiny", max_tokens, cache_ttl)


def test_a_whole_message():
    """Its usage counts every token of the prompt once."""
    message = strict(Message, objects().whole(TOKENS, finished()))
    assert (message.id, message.role, message.content[0].text) == ("msg_1", "assistant", "Hello")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (7, 28, 2)
    assert usage.cache_creation_input_tokens == 0


@pytest.mark.parametrize(("ttl", "minutes", "hours"), [("5m", 7, 0), ("1h", 0, 7)])
def test_what_is_computed_is_kept_if_that_was_wanted(ttl, minutes, hours):
    """It is in any case; who asked for it is told so."""
    usage = strict(Message, objects(ttl).whole(TOKENS, finished())).usage
    assert (usage.input_tokens, usage.cache_creation_input_tokens) == (0, 7)
    created = usage.cache_creation
    assert created.ephemeral_5m_input_tokens == minutes
    assert created.ephemeral_1h_input_tokens == hours


@pytest.mark.parametrize(
    ("reason", "stop_string", "max_tokens", "shown"),
    [
        ("stop", "", 2, ("end_turn", None)),
        ("stop", "###", 2, ("stop_sequence", "###")),
        ("length", "", 2, ("max_tokens", None)),
        ("length", "", 9, ("model_context_window_exceeded", None)),
    ],
)
def test_why_an_answer_ended(reason, stop_string, max_tokens, shown):
    """An answer with fewer tokens than it may have has filled the window."""
    over = replace(finished(reason), stop_string=stop_string)
    message = strict(Message, objects(max_tokens=max_tokens).whole(TOKENS, over))
    assert (message.stop_reason, message.stop_sequence) == shown


def test_a_streamed_message():
    """Its events, in order; the last but one has what the whole message has."""
    made = objects()
    events = [*made.opening(STARTED)]
    for token in TOKENS:
        events += made.piece([token])
    events += made.closing(finished())
    read = [strict(RawMessageStreamEvent, event) for event in events]
    assert [event.type for event in read] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert read[0].message.usage.cache_read_input_tokens == 28
    assert "".join(event.delta.text for event in read[2:4]) == "Hello"
    whole = strict(Message, objects().whole(TOKENS, finished()))
    assert read[-2].delta.stop_reason == whole.stop_reason
    assert read[-2].usage.input_tokens == whole.usage.input_tokens
    assert read[-2].usage.output_tokens == whole.usage.output_tokens


def test_an_answer_without_text_has_no_block():
    """A client that sends the message back must not send an empty block."""
    made, nothing = objects(), [AnswerToken(1, "")]
    events = [*made.opening(STARTED), *made.piece(nothing), *made.closing(finished())]
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    silent = replace(finished(), text="")
    assert strict(Message, objects().whole(nothing, silent)).content == []


def test_an_answer_that_fails_while_it_is_streamed():
    """The last event is the error."""
    made = objects().failure(SessionBusyError("busy", "wait"))
    assert (made["type"], made["error"]["type"]) == ("error", "conflict_error")
    assert made["error"]["message"] == "busy: wait"
