"""Draft lengths: how many drafted tokens a step tries, to yield the most tokens a second. Pure.

A step computes a token of each answer under way. With drafts it computes more tokens, and yields
those that turn out to be right. A drafted token costs what a token adds to a step. It yields the
chance that it, and all tokens before it, are right (`Acceptance`). The tokens of all drafts are
taken in order of their chances, as long as that raises

    (answers + Σ chances) / (seconds of the step + Σ seconds added)

So drafts are long where an answer copies, and short where it is uncertain. There are none where
arithmetic takes most of the time: with many answers at once. If a step without drafts would be
replayed from a graph, and one with drafts cannot be, that counts too.

*Source:* goodput of speculative decoding: Liu et al., "SmartSpec", 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

UNKNOWN_SHARE = 1 / 16  # of a step's time that a token adds, until it is measured

_CLASS_ENDS = (4, 6, 10, 16)  # numbers of matched tokens
_NUM_CLASSES = len(_CLASS_ENDS) + 1
USUAL_CHANCE = 0.5  # until something is known
USUAL_WEIGHT = 8.0  # number of the engine's outcomes that weigh as much as USUAL_CHANCE
ENGINE_WEIGHT = 4.0  # number of an answer's outcomes that weigh as much as all answers'
MOST_SEEN = 256.0  # outcomes of a class, before they are halved: old ones fade


@dataclass
class Acceptance:
    """How often drafted tokens are right, learned from the answers.

    The more of the newest tokens also precede a draft, the likelier it is right. So outcomes are
    counted by classes of that number. An answer starts with the chances of all answers, and soon
    has its own.

    Attributes:
        all_answers: the engine's, from which an answer's own starts; None: this is the engine's.
    """

    all_answers: "Acceptance | None" = None
    _seen: list[float] = field(default_factory=lambda: [0.0] * _NUM_CLASSES)
    _right: list[float] = field(default_factory=lambda: [0.0] * _NUM_CLASSES)

    def note(self, num_matched: int, *, is_right: bool) -> None:
        """Count a token that was, or would have been, drafted, here and in all answers.

        Args:
            num_matched: number of tokens before it that agreed.
            is_right: whether it was right.
        """
        index = _class_of(num_matched)
        self._seen[index] += 1
        self._right[index] += is_right
        if self._seen[index] > MOST_SEEN:
            self._seen[index] /= 2
            self._right[index] /= 2
        if self.all_answers is not None:
            self.all_answers.note(num_matched, is_right=is_right)

    def chances(self, num_matched: int, num_tokens: int) -> list[float]:
        """Return, for each of a draft's tokens, the chance that the draft is right up to it."""
        return list(accumulate((self.chance(num_matched + i) for i in range(num_tokens)), mul))

    def chance(self, num_matched: int) -> float:
        """Return the chance that the token behind `num_matched` tokens that agree is right."""
        before, weight, index = USUAL_CHANCE, USUAL_WEIGHT, _class_of(num_matched)
        if self.all_answers is not None:
            before, weight = self.all_answers.chance(num_matched), ENGINE_WEIGHT
        return (self._right[index] + weight * before) / (self._seen[index] + weight)


def _class_of(num_matched: int) -> int:
    """Return the class of a number of matched tokens."""
    return sum(num_matched >= end for end in _CLASS_ENDS)


@dataclass(frozen=True)
class StepCost:
    """The cost of steps, in any unit of time.

    Attributes:
        plain: of a step without drafts.
        drafted: of a step with as many tokens that is not replayed from a graph.
        token: of each drafted token, in addition.
    """

    plain: float = 1.0
    drafted: float = 1.0
    token: float = UNKNOWN_SHARE


def draft_lengths(chances: Sequence[Sequence[float]], cost: StepCost) -> list[int]:
    """Choose how many tokens of each answer's draft to try.

    Args:
        chances: for each answer the chances of `Acceptance.chances`; empty for one without a draft.
        cost: the cost of the step.
    """
    drafted = sorted((-chance, answer) for answer, each in enumerate(chances) for chance in each)
    tokens, seconds = float(len(chances)), cost.drafted
    best, num_best = tokens / cost.plain, 0
    for number, (minus_chance, _) in enumerate(drafted, 1):
        tokens -= minus_chance
        seconds += cost.token
        if tokens / seconds > best:
            best, num_best = tokens / seconds, number
    lengths = [0] * len(chances)
    for _, answer in drafted[:num_best]:
        lengths[answer] += 1
    return lengths
