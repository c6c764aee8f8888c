"""Objects and events of background responses after their end, and replies that follow one."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from inference_svc.core.turn_record import AnswerToken, Finished, Started
from inference_svc.http_api.openai.responses.response_objects import ResponseObjects
from inference_svc.http_api.sessions.background import events_of_tokens, response_stopped
from inference_svc.http_api.sessions.lookup import CANCELLED, FAILED, UnansweredResponse
from shared.types.errors import ReportedError


def events_of_ended(
    objects: ResponseObjects, tokens: Sequence[AnswerToken], end: Finished, *, is_background: bool
) -> Iterator[Mapping[str, Any]]:
    """Yield the events of an ended response, the same as its followers got."""
    yield from (
        objects.background_opening() if is_background else objects.opening(Started(0, 0, 0.0, 0))
    )
    yield from events_of_tokens(objects, tokens)
    yield from objects.closing(end)


def events_of_unanswered(
    objects: ResponseObjects, found: UnansweredResponse, after: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the first and the last events of a response without an answer; no others are stored.

    Args:
        objects: builds its objects.
        found: the response.
        after: sequence number of the last event that the client has; the end has a higher one.
    """
    number = -1
    for opening in objects.background_opening():
        number = opening["sequence_number"]
        if number > after:
            yield opening
    yield {
        "type": "response.failed",
        "sequence_number": max(number, after) + 1,
        "response": unanswered_object(objects, found),
    }


class FollowedReply:
    """A reply that follows the events of a response; see `replies.Streamed`.

    Args:
        events: the response's events.
        failure: builds the event of a stream that fails.
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


def unanswered_object(objects: ResponseObjects, found: UnansweredResponse) -> dict[str, Any]:
    """Return the object of a response that has no answer and does not run."""
    if found.state == CANCELLED:
        return objects.without_answer(CANCELLED)
    if found.state == FAILED:
        return objects.without_answer(FAILED, {"code": found.code, "message": found.message})
    return objects.without_answer(
        FAILED, {"code": "server_error", "message": str(response_stopped())}
    )
