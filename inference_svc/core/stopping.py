"""When an answer ends, and which of its tokens may be shown before that is certain.

Text that could be the beginning of a stop string is held back together with its tokens; a stop
string may span tokens and may begin inside one. Pure: tokens come with the text they add
(`runtime/turns/detokenize.py`).

Invariants:
    1. released text never contains any part of the stop string that ends the answer;
    2. tokens leave in order, each at most once.
"""

from dataclasses import dataclass
from enum import StrEnum

from inference_svc.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end-of-turn token, or a stop string
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class AnswerToken:
    """One token of an answer.

    Attributes:
        text: what it adds to the answer's text; "" while a character is incomplete.
        logprob: None unless asked for.
        top: (token id, log-probability), most likely first.
    """

    token_id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class GrowingAnswer:
    """The answer of one turn as it is sampled.

    Attributes:
        kept: the tokens of the answer, in order; those of a stop string are not among them.
        cut_text: when a stop string begins inside a token, what of that token's text is kept.
    """

    def __init__(self, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._held: list[AnswerToken] = []
        self._num_sampled = 0
        self.kept: list[AnswerToken] = []
        self.cut_text = ""

    def push(self, token: AnswerToken) -> tuple[list[AnswerToken], FinishReason | None]:
        """Take the next sampled token; return what may be shown now, and why the answer ends."""
        self._held.append(token)
        self._num_sampled += 1
        held_text = "".join(held.text for held in self._held)
        cut = self._find_stop(held_text)
        if cut is not None:
            return self._cut_at(cut), FinishReason.STOP
        if token.token_id in self._eos_ids and not self._params.ignore_eos:
            return self._release(len(self._held)), FinishReason.STOP
        if self._num_sampled >= self._params.max_tokens:
            return self._release(len(self._held)), FinishReason.LENGTH
        return self._release(self._num_tokens_within(self._num_safe_characters(held_text))), None

    @property
    def num_held(self) -> int:
        """Tokens that may not be shown yet."""
        return len(self._held)

    def end(self) -> list[AnswerToken]:
        """Let what was held back go: no token comes any more."""
        return self._release(len(self._held))

    def _find_stop(self, text: str) -> int | None:
        """Index of the first stop string in the text."""
        found = [index for stop in self._params.stop if (index := text.find(stop)) >= 0]
        return min(found, default=None)

    def _num_safe_characters(self, text: str) -> int:
        """Characters that cannot be part of a stop string, whatever comes next."""
        for start in range(len(text)):
            if any(stop.startswith(text[start:]) for stop in self._params.stop):
                return start
        return len(text)

    def _num_tokens_within(self, num_characters: int) -> int:
        """How many held tokens lie wholly within the first characters of the held text.

        Tokens without text at their end do not count: they may be pieces of the next character.
        """
        num_tokens = end = 0
        for index, held in enumerate(self._held):
            end += len(held.text)
            if end > num_characters:
                break
            if held.text or not self._params.stop:
                num_tokens = index + 1
        return num_tokens

    def _cut_at(self, num_characters: int) -> list[AnswerToken]:
        """Keep the tokens before the stop string, and note the text of one that it begins in."""
        released = self._release(self._num_tokens_within(num_characters))
        shown = sum(len(token.text) for token in released)
        self.cut_text = "".join(held.text for held in self._held)[: num_characters - shown]
        self._held.clear()
        return released

    def _release(self, num_tokens: int) -> list[AnswerToken]:
        released, self._held = self._held[:num_tokens], self._held[num_tokens:]
        self.kept += released
        return released
