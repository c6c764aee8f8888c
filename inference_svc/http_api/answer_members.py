"""Members that answers have in all APIs: tokens with log-probabilities, and cache misses."""

from collections.abc import Iterable
from typing import Any

from inference_svc.core.turn_record import AnswerToken, Usage

LOWEST_LOGPROB = -9999.0  # OpenAI's value for "impossible": JSON has no minus infinity
_HALF = "\ufffd"  # the replacement character: a tokenizer's text for a part of a character


class TokenText:
    """Makes the objects of tokens: their text, with log-probabilities.

    Args:
        tokenizer: the model's tokenizer; None if it has none: a token's text is then its id.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def rows(self, tokens: Iterable[AnswerToken], num_top: int) -> list[dict[str, Any]]:
        """Return an object for each token, with its `num_top` most likely alternatives."""
        return [
            self._row(token.token_id, token.logprob)
            | {"top_logprobs": [self._row(*top) for top in token.top[:num_top]]}
            for token in tokens
        ]

    def _row(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        text = self._text(token_id)
        return {
            "token": text,
            "logprob": max(LOWEST_LOGPROB, 0.0 if logprob is None else logprob),
            "bytes": [] if _HALF in text else list(text.encode()),
        }

    def _text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return str(token_id)
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text


def reuse_members(usage: Usage) -> dict[str, Any]:
    """Return the members of usage that only this service has: cache misses, and kept tokens.

    They have no text of the conversation: the session that it resembles may belong to another
    client of the tenant. `inference-svc why` shows the text.
    """
    miss = usage.miss
    reason = miss.cause if miss else usage.recompute_reason
    shown: dict[str, Any] = {"cache_miss_reason": reason} if reason else {}
    if usage.kept_tokens:
        shown |= {"kept_tokens": usage.kept_tokens, "healed_tokens": usage.healed_tokens}
    if miss is not None:
        shown["cache_miss"] = {
            "session_id": miss.session_id or None,
            "token_index": miss.token_index if miss.session_id else None,
            "message_index": miss.message_index,
            "lost_tokens": miss.lost_tokens,
            "lost_s": round(miss.lost_s, 6),
        }
    return shown
