"""Responses that were computed while nobody waited, as their clients see them afterwards."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from inference_svc.core.turn_record import AnswerToken, Finished, Started
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.sessions.background import events_of_tokens, response_stopped
from inference_svc.http_api.sessions.lookup import CANCELLED, FAILED, UnansweredResponse
from shared.types.errors import ReportedError


def events_of_past(
    objects: ResponseObjects, tokens: Sequence[AnswerToken], end: Finished, *, is_background: bool
) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a response that has ended, as those who followed it had them."""
    yield from objects.queued_opening() if is_background else objects.opening(Started(0, 0, 0.0, 0))
    yield from events_of_tokens(objects, tokens)
    yield from objects.closing(end)


def events_of_unanswered(
    objects: ResponseObjects, found: UnansweredResponse, after: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the beginning and the end of a response that has no answer; nothing else is kept.

    Args:
        objects: makes its objects.
        found: the response.
        after: number of the last event that whoever follows it has; its end comes behind that.
    """
    number = -1
    for opening in objects.queued_opening():
        number = opening["sequence_number"]
        if number > after:
            yield opening
    yield {
        "type": "response.failed",
        "sequence_number": max(number, after) + 1,
        "response": shown_unanswered(objects, found),
    }


class Following:
    """The reply with the events of a response; see `replies.Streamed`.

    Args:
        events: of the response.
        failure: makes the event of a stream that fails.
    """

    stream_end: ClassVar[bytes] = b""

    def __init__(
        self,
        events: AsyncGenerator[Mapping[str, Any], None],
        failure: Callable[[ReportedError], Mapping[str, Any]],
    ) -> None:
        self._events = events
        self._failure = failure

    def events(self) -> AsyncGenerator[Mapping[str, Any], None]:
        """See Streamed."""
        return self._events

    def failure(self, error: ReportedError) -> Mapping[str, Any]:
        """See Streamed."""
        return self._failure(error)


def shown_unanswered(objects: ResponseObjects, found: UnansweredResponse) -> dict[str, Any]:
    """Make the response that has no answer, and does not run."""
    if found.state == CANCELLED:
        return objects.standing(CANCELLED)
    if found.state == FAILED:
        return objects.standing(FAILED, {"code": found.code, "message": found.message})
    return objects.standing(FAILED, {"code": "server_error", "message": str(response_stopped())})
