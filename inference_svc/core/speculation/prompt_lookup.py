"""Prompt lookup: drafts the next tokens from what followed the same tokens earlier. Pure.

Answers repeat parts of their context: a file that is edited, a name, a table's columns. If the
newest tokens occurred before, the tokens that followed there are the draft. Of several such places
the one that agrees with most tokens before it is taken, and among equals the latest. As long as the
answer continues as it did there, so does the draft, and its chances grow with each token. A client
may predict most of the answer. The prediction is put before the context, and the first draft is
taken from it.

Places are found by the GRAM_TOKENS tokens that end there: those of the prompt in a sorted array
that is made once (0.1 ms for 1,000 tokens), those of the answer in a dictionary. A token costs a
few microseconds, also when nothing is drafted, so that it is known what a draft would have been
worth.

*Source:* prompt lookup decoding (Saxena, 2023); longest match: the suffix automata of SAM-Decoding
(2024), for less memory.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inference_svc.core.speculation.draft_lengths import Acceptance

GRAM_TOKENS = 3
MOST_MATCHED = 16  # most tokens that are compared at a place
MOST_PLACES = 8  # most places that are compared
MOST_TOKENS = 1 << 17  # the newest tokens of the prompt that are indexed: sorting takes 10 ms
# Hash factors, odd and without a pattern: sums of products with them, modulo 2^64, identify grams.
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_MASK = (1 << 64) - 1

Grams = npt.NDArray[np.uint64]


class PromptLookup:
    """Drafts for one answer.

    Args:
        prompt_ids: the context before the answer.
        acceptance: counts how often drafts are right.
        predicted_ids: tokens that the answer will likely consist of or contain.

    Attributes:
        num_matched: number of newest tokens that agree with those before the draft; 0: there is no
            draft.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        acceptance: Acceptance,
        predicted_ids: Sequence[int] = (),
    ) -> None:
        self.num_matched = GRAM_TOKENS if predicted_ids else 0  # a prediction is worth a match
        self._acceptance = acceptance
        self._num_context = len(prompt_ids)
        self._token_ids = [*predicted_ids, *prompt_ids[-MOST_TOKENS:]]
        self._num_seen = len(self._token_ids)
        self._grams, self._ends = _sorted_grams(self._token_ids)
        self._newer: dict[int, int] = {}  # latest end of a gram in the answer, by gram
        self._next = 0  # position of the draft's first token
        if not predicted_ids:
            self._find()

    def advance(self, context_ids: Sequence[int]) -> None:
        """Read the tokens that were appended to the context, and count which drafts were right."""
        token_ids = self._token_ids
        token_ids += context_ids[self._num_context :]
        self._num_context = len(context_ids)
        while self._num_seen < len(token_ids):
            if self.num_matched:
                is_right = token_ids[self._next] == token_ids[self._num_seen]
                self._acceptance.note(self.num_matched, is_right=is_right)
                self.num_matched = self.num_matched + 1 if is_right else 0
                self._next += 1
            self._num_seen += 1
            if not self.num_matched:
                self._find()
            if self._num_seen >= GRAM_TOKENS:
                self._newer[self._newest_gram()] = self._num_seen

    def chances(self, most_tokens: int) -> list[float]:
        """Return the chance that the draft is right up to each token; [] if there is no draft."""
        return self._acceptance.chances(self.num_matched, most_tokens) if self.num_matched else []

    def draft(self, num_tokens: int) -> list[int]:
        """Return the draft's first tokens; a draft that reaches the newest token repeats itself."""
        assert self.num_matched or not num_tokens, "there is no draft"
        period = self._num_seen - self._next
        return [self._token_ids[self._next + i % period] for i in range(num_tokens)]

    def _find(self) -> None:
        """Find the place that agrees with most of the newest tokens."""
        if self._num_seen < GRAM_TOKENS:
            return
        for end in self._places():
            num_matched = self._num_agreeing(end)
            if num_matched >= GRAM_TOKENS and num_matched > self.num_matched:
                self.num_matched, self._next = num_matched, end

    def _places(self) -> list[int]:
        """List earlier ends of the newest gram, latest first; some may be hash collisions."""
        gram = self._newest_gram()
        end = int(np.searchsorted(self._grams, np.uint64(gram), side="right"))
        start = max(0, end - MOST_PLACES)
        places = [
            int(place)
            for found, place in zip(self._grams[start:end], self._ends[start:end], strict=True)
            if found == gram and place < self._num_seen
        ]
        newer = self._newer.get(gram)
        return [*([] if newer is None else [newer]), *reversed(places)]

    def _num_agreeing(self, end: int) -> int:
        """Count the tokens before a place that agree with the newest ones, up to MOST_MATCHED."""
        token_ids, newest = self._token_ids, self._num_seen
        for count in range(min(MOST_MATCHED, end)):
            if token_ids[end - 1 - count] != token_ids[newest - 1 - count]:
                return count
        return min(MOST_MATCHED, end)

    def _newest_gram(self) -> int:
        newest = self._token_ids[self._num_seen - GRAM_TOKENS : self._num_seen]
        return sum(token * factor for token, factor in zip(newest, _FACTORS, strict=True)) & _MASK


def _sorted_grams(token_ids: Sequence[int]) -> tuple[Grams, npt.NDArray[np.int64]]:
    """Return the grams of a context, sorted, and the position where each ends.

    Equal grams are in order of their position.

    Returns:
        (grams [n], ends [n]), n: the number of tokens minus GRAM_TOKENS - 1.
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    num_grams = max(0, len(ids) - GRAM_TOKENS + 1)
    grams = np.zeros(num_grams, np.uint64)
    for place, factor in enumerate(_FACTORS):
        grams += ids[place : place + num_grams] * np.uint64(factor)
    order = np.argsort(grams, kind="stable")
    return grams[order], order + GRAM_TOKENS
