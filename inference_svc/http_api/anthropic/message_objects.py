"""The objects of /v1/messages: a message, and the events of a streamed one.

The events come in this order:

    message_start, content_block_start, content_block_delta…, content_block_stop,
    message_delta, message_stop | error

An answer without text has no block.

*Source:* Anthropic API reference, "Messages" and "Streaming messages"; beside what a message has
stands `session_id`.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from inference_svc.core.answers import AnswerToken
from inference_svc.core.turn_record import Finished, Started
from inference_svc.http_api.anthropic.dialect import error_body
from shared.types.errors import ReportedError


class MessageObjects:
    """Makes the objects of one answer.

    Args:
        message_id: its id.
        session_id: the session that it is a turn of.
        model: the model's name as the client wrote it.
        max_tokens: the client's bound of the answer; fewer tokens have filled the window.
        cache_ttl: how long the client wants the prompt to be kept; "" if it does not say.
    """

    def __init__(
        self, message_id: str, session_id: str, model: str, max_tokens: int, cache_ttl: str
    ) -> None:
        self._id = message_id
        self._session_id = session_id
        self._model = model
        self._max_tokens = max_tokens
        self._cache_ttl = cache_ttl
        self._has_text = False

    def whole(self, _tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """Make the answer of a request that is not streamed."""
        content = [_block(finished.text)] if finished.text else []
        return self._message(content, self._usage_of(finished)) | self._why(finished)

    def opening(self, started: Started) -> Iterator[dict[str, Any]]:
        """Make the first event: an empty message, and what its prompt cost."""
        usage = self._usage(started.history_tokens + started.new_tokens, started.reused_tokens, 0)
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": message}

    def piece(self, tokens: Sequence[AnswerToken]) -> Iterator[dict[str, Any]]:
        """Make the event of the next tokens; none if they show nothing."""
        text = "".join(token.text for token in tokens)
        if not text:
            return
        if not self._has_text:
            self._has_text = True
            yield {"type": "content_block_start", "index": 0, "content_block": _block("")}
        delta = {"type": "text_delta", "text": text}
        yield {"type": "content_block_delta", "index": 0, "delta": delta}

    def closing(self, finished: Finished) -> Iterator[dict[str, Any]]:
        """Make the events of its end."""
        if self._has_text:
            yield {"type": "content_block_stop", "index": 0}
        delta, usage = self._why(finished), self._usage_of(finished)
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def failure(self, error: ReportedError) -> dict[str, Any]:
        """Make the event of an answer that has failed."""
        return error_body(error)

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "usage": usage,
            "session_id": self._session_id,
        }

    def _why(self, finished: Finished) -> dict[str, Any]:
        """Say why an answer ended."""
        reason = "stop_sequence" if finished.stop_string else "end_turn"
        if finished.finish_reason == "length":
            is_bounded = finished.usage.output_tokens >= self._max_tokens
            reason = "max_tokens" if is_bounded else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": finished.stop_string or None}

    def _usage_of(self, finished: Finished) -> dict[str, Any]:
        usage = finished.usage
        prompt_tokens = usage.history_tokens + usage.new_tokens
        return self._usage(prompt_tokens, usage.reused_tokens, usage.output_tokens)

    def _usage(self, prompt_tokens: int, reused_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Make the usage: all that is computed is kept, and counts so if the client wanted it."""
        computed_tokens = prompt_tokens - reused_tokens
        kept = {ttl: computed_tokens if ttl == self._cache_ttl else 0 for ttl in ("5m", "1h")}
        return {
            "input_tokens": 0 if self._cache_ttl else computed_tokens,
            "cache_creation_input_tokens": sum(kept.values()),
            "cache_read_input_tokens": reused_tokens,
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": n for ttl, n in kept.items()},
            "output_tokens": output_tokens,
            "service_tier": "standard",
        }


def _block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}
