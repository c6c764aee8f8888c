"""Responses and their events, parsed by the official client's types."""

from dataclasses import replace

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from inference_svc.core.errors import SessionBusyError
from inference_svc.http_api.answer_members import TokenText
from inference_svc.http_api.answer_parts import Reading
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.sessions.lookup import ResponseInfo
from tests.inference_svc.http_api.as_clients_read import (
    STARTED,
    TOKENS,
    Letters,
    make_finished,
    strict,
)
from tests.inference_svc.http_api.scripted_calls import READING, calling
from tests.inference_svc.http_api.scripted_calls import TOKENS as CALL_TOKENS

INFO = ResponseInfo(1_700_000_000, "tiny", instructions="Be brief.", metadata={"a": "b"})


@pytest.mark.parametrize(
    ("reason", "last", "status"),
    [("stop", "response.completed", "completed"), ("length", "response.incomplete", "incomplete")],
)
def test_the_events_of_a_response(reason, last, status):
    """In OpenAI's order, numbered, each of the client's type; the last one has everything."""
    events = ResponseObjects("resp_1", "s-1", INFO, TokenText(Letters()), Reading(), 1)
    made = [*events.opening(STARTED), *events.piece([TOKENS[0]]), *events.piece([TOKENS[1]])]
    made += events.closing(make_finished(reason))
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
    """It is the object of the last event."""
    events = ResponseObjects("resp_1", "s-1", INFO, TokenText(Letters()), Reading(), None)
    response = strict(Response, events.whole(TOKENS, make_finished("length")))
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.id, response.metadata) == ("resp_1", {"a": "b"})
    assert response.output[0].content[0].logprobs == []


def test_a_response_that_fails_during_its_stream():
    """The error is in the last event."""
    events = ResponseObjects("resp_1", "s-1", INFO, TokenText(None), Reading(), None)
    made = events.failure(SessionBusyError("busy", "wait"))
    assert made["type"] == "response.failed"
    assert made["response"]["status"] == "failed"
    assert made["response"]["error"] == {"code": "session_busy", "message": "busy: wait"}


def objects_of_calls(top_logprobs=None):
    return ResponseObjects("resp_1", "s-1", INFO, TokenText(None), READING, top_logprobs)


def test_a_response_with_thoughts_text_and_calls():
    """Each is an item of its own; streamed ones equal whole ones."""
    events = objects_of_calls()
    made = [*events.opening(STARTED), *(made for t in CALL_TOKENS for made in events.piece([t]))]
    made += events.closing(calling())
    read = [strict(ResponseStreamEvent, one) for one in made]
    assert [event.sequence_number for event in read] == list(range(len(read)))
    output = read[-1].response.output
    assert [item.type for item in output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert len({item.id for item in output}) == 4
    assert output[0].content[0].text == "Two words."
    assert output[1].content[0].text == "I look."
    assert [(item.name, item.arguments, item.call_id) for item in output[2:]] == [
        ("look", '{"a": 1}', "call_0"),
        ("see", '{"b": "é"}', "call_1"),
    ]
    done = [event.item for event in read if event.type == "response.output_item.done"]
    assert done == output
    deltas = [event for event in read if event.type == "response.function_call_arguments.delta"]
    assert [(event.output_index, event.delta) for event in deltas] == [
        (2, '{"a": 1}'),
        (3, '{"b": "é"}'),
    ]
    whole = strict(Response, objects_of_calls().whole(CALL_TOKENS, calling()))
    assert whole.output == output


def test_log_probabilities_beside_calls():
    """All tokens up to the message's end are in the message: none is lost."""
    response = strict(Response, objects_of_calls(1).whole(CALL_TOKENS, calling()))
    assert response.output[1].content[0].logprobs


def test_an_empty_answer():
    """It is an empty message."""
    end = replace(make_finished(), text="")
    response = strict(
        Response,
        ResponseObjects("resp_1", "s-1", INFO, TokenText(None), Reading()).whole((), end),
    )
    assert response.output_text == ""
    assert len(response.output) == 1
