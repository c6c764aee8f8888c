"""The objects of /v1/chat/completions: a whole answer, and the chunks of a stream. Pure.

*Source:* OpenAI API reference, "Chat"; beside it stands `session_id`, which the client may name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.core.answers import AnswerToken
from inference_svc.core.turn_record import Finished, Usage
from inference_svc.openai.token_text import TokenText


@dataclass(frozen=True)
class ChatObjects:
    """Makes the objects of one answer.

    Attributes:
        completion_id: of the answer.
        created: seconds of the epoch.
        model: as the client named it.
        fingerprint: of the model that answers.
        top_logprobs: how many alternatives of each token; None: no log-probabilities.
        includes_usage: every chunk has the member `usage`, and the last one has a value there.
    """

    completion_id: str
    created: int
    model: str
    fingerprint: str
    session_id: str
    token_text: TokenText
    top_logprobs: int | None = None
    includes_usage: bool = False

    def whole(self, tokens: Sequence[AnswerToken], finished: Finished) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": finished.text,
            "refusal": None,
            "annotations": [],
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finished.finish_reason,
        }
        return self._object("chat.completion", [choice]) | {"usage": chat_usage(finished.usage)}

    def opening(self) -> dict[str, Any]:
        """The first chunk: whose message it is."""
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, None)

    def piece(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        """A chunk with the next tokens; None if they show nothing."""
        text = "".join(token.text for token in tokens)
        logprobs = self._logprobs(tokens)
        return self._chunk({"content": text}, None, logprobs) if text or logprobs else None

    def closing(self, finished: Finished) -> Iterable[dict[str, Any]]:
        """The last chunks: why it ended, and the usage if the client asked for it."""
        yield self._chunk({}, finished.finish_reason)
        if self.includes_usage:
            yield self._object("chat.completion.chunk", []) | {"usage": chat_usage(finished.usage)}

    def _chunk(
        self, delta: dict[str, Any], finish_reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk = self._object("chat.completion.chunk", [choice])
        return chunk | {"usage": None} if self.includes_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint[:12]}",
            "service_tier": "default",
            "choices": choices,
            "session_id": self.session_id,
        }

    def _logprobs(self, tokens: Sequence[AnswerToken]) -> dict[str, Any] | None:
        if self.top_logprobs is None or not tokens:
            return None
        return {"content": self.token_text.rows(tokens, self.top_logprobs), "refusal": None}


def chat_usage(usage: Usage) -> dict[str, Any]:
    """What it cost: tokens that were not computed again are `cached_tokens`."""
    prompt_tokens = usage.history_tokens + usage.new_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
