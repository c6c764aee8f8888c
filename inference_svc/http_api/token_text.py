"""Tokens as text, with log-probabilities, as both APIs show them."""

from collections.abc import Iterable
from typing import Any

from inference_svc.core.answers import AnswerToken

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
