"""The events of a streamed response, in order and numbered. Pure; made for one stream.

    created, in_progress, output_item.added, content_part.added,
    output_text.delta…, output_text.done, content_part.done, output_item.done,
    completed | incomplete | failed

*Source:* OpenAI API reference, "Streaming events".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inference_svc.core.answers import AnswerToken
from inference_svc.core.turn_record import Finished
from inference_svc.openai.response_objects import (
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    INCOMPLETE,
    ResponseFacts,
    item_id,
    message_item,
    response_object,
    status_of_turn,
    text_part,
)
from inference_svc.openai.token_text import TokenText


class ResponseEvents:
    """Makes the events of one stream.

    Args:
        response_id: of the response.
        session_id: that it is a turn of.
        facts: about it.
        token_text: writes tokens.
        top_logprobs: how many alternatives of each token; None: no log-probabilities.
    """

    def __init__(
        self,
        response_id: str,
        session_id: str,
        facts: ResponseFacts,
        token_text: TokenText,
        top_logprobs: int | None,
    ) -> None:
        self._id = response_id
        self._session_id = session_id
        self._facts = facts
        self._token_text = token_text
        self._top_logprobs = top_logprobs
        self._logprobs: list[dict[str, Any]] = []
        self._number = 0

    def opening(self) -> Iterator[dict[str, Any]]:
        """The turn has begun."""
        response = response_object(self._id, self._session_id, self._facts, IN_PROGRESS, [])
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})
        item = message_item(self._id, IN_PROGRESS)
        yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        yield self._of_part("response.content_part.added", {"part": text_part("")})

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Its next tokens; nothing if they show nothing."""
        text = "".join(token.text for token in tokens)
        rows = []
        if self._top_logprobs is not None:
            rows = self._token_text.rows(tokens, self._top_logprobs)
            self._logprobs += rows
        if text or rows:
            yield self._of_part("response.output_text.delta", {"delta": text, "logprobs": rows})

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """It has ended."""
        status = status_of_turn(finished.finish_reason)
        part = text_part(finished.text, self._logprobs)
        item = message_item(self._id, COMPLETED if status == COMPLETED else INCOMPLETE, [part])
        done = {"text": finished.text, "logprobs": self._logprobs}
        yield self._of_part("response.output_text.done", done)
        yield self._of_part("response.content_part.done", {"part": part})
        yield self._event("response.output_item.done", {"output_index": 0, "item": item})
        response = response_object(
            self._id, self._session_id, self._facts, status, [item], finished.usage
        )
        kind = "completed" if status == COMPLETED else "incomplete"
        yield self._event(f"response.{kind}", {"response": response})

    def failure(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """It has failed; `error` is OpenAI's error object."""
        said = {"code": error["code"], "message": error["message"]}
        response = response_object(self._id, self._session_id, self._facts, FAILED, [], error=said)
        return self._event("response.failed", {"response": response})

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """The response of a request that is not streamed."""
        rows = None
        if self._top_logprobs is not None:
            rows = self._token_text.rows(tokens, self._top_logprobs)
        return finished_response(self._id, self._session_id, self._facts, finished, rows)

    def _of_part(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        place = {"item_id": item_id(self._id), "output_index": 0, "content_index": 0}
        return self._event(kind, {**place, **members})

    def _event(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}


def finished_response(
    response_id: str,
    session_id: str,
    facts: ResponseFacts,
    finished: Finished,
    logprobs: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A response that has ended."""
    status = status_of_turn(finished.finish_reason)
    item_status = COMPLETED if status == COMPLETED else INCOMPLETE
    item = message_item(response_id, item_status, [text_part(finished.text, logprobs)])
    return response_object(response_id, session_id, facts, status, [item], finished.usage)
