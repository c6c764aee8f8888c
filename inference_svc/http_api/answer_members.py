"""Members that answers have in all APIs: tokens with log-probabilities, and cache misses."""

import re
from collections.abc import Iterable
from itertools import count
from typing import Any

from inference_svc.core.turn_record import AnswerToken, Usage

LOWEST_LOGPROB = -9999.0  # OpenAI's value for "impossible": JSON has no minus infinity
_HALF = "\ufffd"  # the replacement character: a tokenizer's text for a part of a character
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # a byte's name in tokenizers that fall back to bytes
# Characters that stand for bytes in the tokens of byte-level tokenizers: printable ones for
# themselves, the others in order from U+0100 on. *Source:* GPT-2's encoder.
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | dict(
    zip(map(chr, count(0x100)), (b for b in range(0x100) if b not in _PRINTABLE), strict=False)
)


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
            "bytes": self._bytes(token_id) if _HALF in text else list(text.encode()),
        }

    def _bytes(self, token_id: int) -> list[int]:
        """Return the bytes of a token with a part of a character; [] if they are not known.

        Clients join the bytes of several tokens, and decode them together.
        """
        assert self._tokenizer is not None, "an id has no parts of characters"  # noqa: S101
        name: str = self._tokenizer.convert_ids_to_tokens(token_id)
        byte = _BYTE.fullmatch(name)
        if byte:
            return [int(byte[1], 16)]
        return [_BYTE_OF[each] for each in name] if _BYTE_OF.keys() >= set(name) else []

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
