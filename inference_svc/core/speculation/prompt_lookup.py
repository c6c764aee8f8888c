"""PromptLookup: guesses what comes next from what came next before, in the same context. Pure.

Answers repeat what was said: a file that is edited, a name, a table's columns. Where the newest
tokens stood before, what followed there is the draft. Of several such places the one is taken that
agrees with most tokens before it, of equals the latest. As long as the answer goes on as it did
there, so does the draft, and it is surer with each token. A client that knows what most of the
answer will be says so: that stands before the context, and is what the answer's first draft is of.

A place is found by the GRAM_TOKENS tokens that end there: those of the prompt in a sorted array,
made once (0.1 ms for 1,000 tokens), those of the answer in a dictionary. A token costs a few
microseconds; when nothing is drafted, too, so that it is known what a draft would have been worth.

*Source:* prompt lookup decoding (Saxena, 2023); longest match: the suffix automata of SAM-Decoding
(2024), for less memory.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inference_svc.core.speculation.draft_lengths import Acceptance

GRAM_TOKENS = 3
MOST_MATCHED = 16  # tokens that places are compared by
MOST_PLACES = 8  # that are compared
MOST_TOKENS = 1 << 17  # of the prompt that are looked at, the newest ones: sorting takes 10 ms
# Odd, and without a pattern: sums of products with them tell grams apart (wrapped at 64 bits).
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_MASK = (1 << 64) - 1

Grams = npt.NDArray[np.uint64]


class PromptLookup:
    """See the module docstring.

    Args:
        prompt_ids: the context before the answer.
        acceptance: counts what drafts were worth.
        predicted_ids: what the answer will likely be, or have in it.

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
        self.num_matched = GRAM_TOKENS if predicted_ids else 0  # it is worth as much at least
        self._acceptance = acceptance
        self._num_context = len(prompt_ids)
        self._token_ids = [*predicted_ids, *prompt_ids[-MOST_TOKENS:]]
        self._num_seen = len(self._token_ids)
        self._grams, self._ends = _sorted_grams(self._token_ids)
        self._newer: dict[int, int] = {}  # the latest end of a gram that ends behind the prompt
        self._next = 0  # place of the token that the draft begins with
        if not predicted_ids:
            self._find()

    def advance(self, context_ids: Sequence[int]) -> None:
        """Take note of what the context has grown by, and of what drafts were worth."""
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
        """Return that many tokens of the draft; what repeats itself goes on repeating itself."""
        assert self.num_matched or not num_tokens, "there is no draft"
        period = self._num_seen - self._next
        return [self._token_ids[self._next + i % period] for i in range(num_tokens)]

    def _find(self) -> None:
        """Look for the place that agrees with most of the newest tokens."""
        if self._num_seen < GRAM_TOKENS:
            return
        for end in self._places():
            num_matched = self._num_agreeing(end)
            if num_matched >= GRAM_TOKENS and num_matched > self.num_matched:
                self.num_matched, self._next = num_matched, end

    def _places(self) -> list[int]:
        """List ends of the newest gram that are before it, the latest first; some may be wrong."""
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
        """Count the tokens before a place that are the newest ones, MOST_MATCHED at most."""
        token_ids, newest = self._token_ids, self._num_seen
        for count in range(min(MOST_MATCHED, end)):
            if token_ids[end - 1 - count] != token_ids[newest - 1 - count]:
                return count
        return min(MOST_MATCHED, end)

    def _newest_gram(self) -> int:
        newest = self._token_ids[self._num_seen - GRAM_TOKENS : self._num_seen]
        return sum(token * factor for token, factor in zip(newest, _FACTORS, strict=True)) & _MASK


def _sorted_grams(token_ids: Sequence[int]) -> tuple[Grams, npt.NDArray[np.int64]]:
    """Return the grams of a context, sorted, and for each where it ends: equals from first to last.

    Returns:
        (grams [n], ends [n]), n tokens less those before the first gram's last
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    num_grams = max(0, len(ids) - GRAM_TOKENS + 1)
    grams = np.zeros(num_grams, np.uint64)
    for place, factor in enumerate(_FACTORS):
        grams += ids[place : place + num_grams] * np.uint64(factor)
    order = np.argsort(grams, kind="stable")
    return grams[order], order + GRAM_TOKENS
