"""Responses and their events, read by the official client's own types."""

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from inference_svc.core.errors import SessionBusyError
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.openai.response_objects import ResponseObjects
from inference_svc.http_api.sessions.lookup import ResponseInfo
from inference_svc.http_api.token_text import TokenText
from tests.inference_svc.http_api.as_clients_read import STARTED, TOKENS, Letters, finished, strict

INFO = ResponseInfo(1_700_000_000, "tiny", instructions="Be brief.", metadata={"a": "b"})


@pytest.mark.parametrize(
    ("reason", "last", "status"),
    [("stop", "response.completed", "completed"), ("length", "response.incomplete", "incomplete")],
)
def test_the_events_of_a_response(reason, last, status):
    """In OpenAI's order, numbered, each of the client's type; the last one has all."""
    events = ResponseObjects("resp_1", "s-1", INFO, TokenText(Letters()), Reading(), 1)
    made = [*events.opening(STARTED), *events.piece([TOKENS[0]]), *events.piece([TOKENS[1]])]
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
    events = ResponseObjects("resp_1", "s-1", INFO, TokenText(Letters()), Reading(), None)
    response = strict(Response, events.whole(TOKENS, finished("length")))
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.id, response.metadata) == ("resp_1", {"a": "b"})
    assert response.output[0].content[0].logprobs == []


def test_a_response_that_fails_while_it_is_streamed():
    """The error is in the last event."""
    events = ResponseObjects("resp_1", "s-1", INFO, TokenText(None), Reading(), None)
    made = events.failure(SessionBusyError("busy", "wait"))
    assert made["type"] == "response.failed"
    assert made["response"]["status"] == "failed"
    assert made["response"]["error"] == {"code": "session_busy", "message": "busy: wait"}
