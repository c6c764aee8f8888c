"""The objects of /v1/responses: a response as it stands, and the events of a streamed one.

The events come in order and numbered:

    created, in_progress, output_item.added, content_part.added,
    output_text.delta…, output_text.done, content_part.done, output_item.done,
    completed | incomplete | failed

*Source:* OpenAI API reference, "Responses" and "Streaming events"; beside what it has stands
`session_id`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inference_svc.core.answers import AnswerToken
from inference_svc.core.turn_record import Finished, Started, Usage
from inference_svc.http_api.openai.dialect import error_object
from inference_svc.http_api.sessions.lookup import ResponseInfo
from inference_svc.http_api.token_text import TokenText
from shared.types.errors import ReportedError

IN_PROGRESS = "in_progress"
COMPLETED = "completed"
INCOMPLETE = "incomplete"
FAILED = "failed"

Rows = list[dict[str, Any]]  # tokens with their log-probabilities


class ResponseObjects:
    """Makes the objects of one response.

    Args:
        response_id: its id.
        session_id: the session that it is a turn of.
        info: its members beside its answer.
        token_text: writes tokens.
        top_logprobs: how many alternatives of each token; None: no log-probabilities.
    """

    def __init__(
        self,
        response_id: str,
        session_id: str,
        info: ResponseInfo,
        token_text: TokenText,
        top_logprobs: int | None = None,
    ) -> None:
        self._id = response_id
        self._item_id = "msg_" + response_id.removeprefix("resp_")
        self._session_id = session_id
        self._info = info
        self._token_text = token_text
        self._top_logprobs = top_logprobs
        self._logprobs: Rows = []
        self._number = 0

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Make a response that has ended; `tokens` may be left out if they are not to be shown."""
        status = _status(finished)
        item = self._item(status, [_text_part(finished.text, self._rows(tokens))])
        return self._response(status, [item], finished.usage)

    def opening(self, _started: Started) -> Iterator[dict[str, Any]]:
        """Make the events of a turn that has begun."""
        response = self._response(IN_PROGRESS, [])
        yield self._event("response.created", {"response": response})
        yield self._event("response.in_progress", {"response": response})
        item = self._item(IN_PROGRESS, [])
        yield self._event("response.output_item.added", {"output_index": 0, "item": item})
        yield self._of_part("response.content_part.added", {"part": _text_part("", [])})

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Make the event of its next tokens; none if they show nothing."""
        text = "".join(token.text for token in tokens)
        rows = self._rows(tokens)
        self._logprobs += rows
        if text or rows:
            yield self._of_part("response.output_text.delta", {"delta": text, "logprobs": rows})

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Make the events of its end."""
        status = _status(finished)
        part = _text_part(finished.text, self._logprobs)
        item = self._item(status, [part])
        done = {"text": finished.text, "logprobs": self._logprobs}
        yield self._of_part("response.output_text.done", done)
        yield self._of_part("response.content_part.done", {"part": part})
        yield self._event("response.output_item.done", {"output_index": 0, "item": item})
        response = self._response(status, [item], finished.usage)
        yield self._event(f"response.{status}", {"response": response})

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Make the event of a turn that has failed."""
        found = error_object(error)
        said = {"code": found["code"], "message": found["message"]}
        return self._event("response.failed", {"response": self._response(FAILED, [], error=said)})

    def _rows(self, tokens: Sequence[AnswerToken]) -> Rows:
        if self._top_logprobs is None:
            return []
        return self._token_text.rows(tokens, self._top_logprobs)

    def _of_part(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(kind, {**place, **members})

    def _event(self, kind: str, members: Mapping[str, Any]) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}

    def _item(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Make the one item of a response's output."""
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": parts,
        }

    def _response(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Make a response as it stands."""
        info = self._info
        is_cut = status == INCOMPLETE
        return {
            "id": self._id,
            "object": "response",
            "created_at": info.created_s,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": info.instructions or None,
            "max_output_tokens": info.max_output_tokens,
            "metadata": dict(info.metadata),
            "model": info.model,
            "output": output,
            "parallel_tool_calls": False,
            "previous_response_id": info.previous_id or None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": info.is_kept,
            "temperature": info.temperature,
            "text": {"format": dict(info.text_format)},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": info.top_logprobs,
            "top_p": info.top_p,
            "truncation": info.truncation,
            "usage": response_usage(usage) if usage else None,
            "session_id": self._session_id,
        }


def response_usage(usage: Usage) -> dict[str, Any]:
    """Make the usage of a response: tokens that were not computed again are `cached_tokens`."""
    input_tokens = usage.history_tokens + usage.new_tokens
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.reused_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + usage.output_tokens,
    }


def _status(finished: Finished) -> str:
    """Return a turn's finish reason as a response's status."""
    return INCOMPLETE if finished.finish_reason == "length" else COMPLETED


def _text_part(text: str, logprobs: Rows) -> dict[str, Any]:
    """Make the one part of a response's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
