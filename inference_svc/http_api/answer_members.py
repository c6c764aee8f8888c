"""What answers have in all APIs alike: tokens with log-probabilities, and what the cache missed."""

from collections.abc import Iterable
from typing import Any

from inference_svc.core.turn_record import AnswerToken, Usage

LOWEST_LOGPROB = -9999.0  # OpenAI's word for "never": JSON has no minus infinity
_HALF = "\ufffd"  # what a tokenizer writes for a piece of a character


class TokenText:
    """Writes token ids as text, with log-probabilities.

    Args:
        tokenizer: the model's; None: a token is named by its number.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    def rows(self, tokens: Iterable[AnswerToken], num_top: int) -> list[dict[str, Any]]:
        """Make one object for each token, with its `num_top` most likely alternatives."""
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


def shown_reuse(usage: Usage) -> dict[str, Any]:
    """Return the members beside those that the vendors know: what was missed, what was kept.

    Texts are not among them: the session that the conversation resembles may be another client's
    of the tenant. `inference-svc why` shows them.
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
