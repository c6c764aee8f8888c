"""Token ids to text while they are sampled: never half a character.

A byte-level token may be part of a character, and a decoder may treat the first token of a text
differently (a leading space). So each token is decoded together with a few before it, and only what
it adds is returned.

*Source:* the two-offset window of Hugging Face's text-generation-inference.
"""

from collections.abc import Sequence
from typing import Any

NUM_CONTEXT_TOKENS = (
    6  # of the prompt, so that the answer's first token is decoded as a continuation
)
MAX_HELD_TOKENS = 8  # a character has at most four bytes: more held tokens are not a character
INCOMPLETE = "\ufffd"  # what decoders write for bytes that are not a character


class Detokenizer:
    """Decodes one answer; without a tokenizer every token's text is empty."""

    def __init__(self, tokenizer: Any | None, prompt_ids: Sequence[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._ids = list(prompt_ids[-NUM_CONTEXT_TOKENS:])
        self._window_start = 0
        self._num_read = len(self._ids)

    def push(self, token_id: int) -> str:
        """Return the text that the next token adds; empty while a character is incomplete."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window_start : self._num_read])
        text = self._decode(self._ids[self._window_start :])
        is_complete = len(text) > len(before) and not text.endswith(INCOMPLETE)
        if not is_complete and len(self._ids) - self._num_read < MAX_HELD_TOKENS:
            return ""
        self._window_start, self._num_read = self._num_read, len(self._ids)
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text
