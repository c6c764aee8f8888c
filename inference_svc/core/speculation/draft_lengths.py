"""How many drafted tokens a step is to try: as many as make it yield more tokens a second. Pure.

A step computes a token of each answer under way. With drafts it computes more, and yields those
that turn out right. A drafted token costs what a token adds to a step, and yields the chance that
it, and all before it, are right (`Acceptance`). The tokens of all drafts are taken in order of
their chances, as long as that raises

    (answers + Σ chances) / (seconds of the step + Σ seconds added)

So drafts are long where an answer copies, short where it is uncertain, and there are none where
arithmetic is what takes the time: with many answers at once. If a step without drafts would be
replayed from a graph, and one with drafts cannot be, that counts too.

*Source:* goodput of speculative decoding: Liu et al., "SmartSpec", 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

UNKNOWN_SHARE = 1 / 16  # of a step that a token adds, until it was measured

_CLASS_ENDS = (4, 6, 10, 16)  # of tokens matched
_NUM_CLASSES = len(_CLASS_ENDS) + 1
USUAL_CHANCE = 0.5  # until something is known
USUAL_WEIGHT = 8.0  # outcomes of an engine that weigh as much
ENGINE_WEIGHT = 4.0  # outcomes of an answer that weigh as much as all answers'
MOST_SEEN = 256.0  # outcomes of a class, before they are halved: old ones fade


@dataclass
class Acceptance:
    """How often drafts are right, learned while answering.

    The more of the newest tokens stand before a draft, too, the surer it is: so outcomes are
    counted by classes of that number. An answer begins with what is known of all answers, and soon
    differs.

    Attributes:
        all_answers: that of the engine, which an answer's own begins as; None: this is it.
    """

    all_answers: "Acceptance | None" = None
    _seen: list[float] = field(default_factory=lambda: [0.0] * _NUM_CLASSES)
    _right: list[float] = field(default_factory=lambda: [0.0] * _NUM_CLASSES)

    def note(self, num_matched: int, *, is_right: bool) -> None:
        """Count a token that was, or would have been, drafted, here and in all answers.

        Args:
            num_matched: number of tokens before it that agreed.
            is_right: whether it came.
        """
        of = _class_of(num_matched)
        self._seen[of] += 1
        self._right[of] += is_right
        if self._seen[of] > MOST_SEEN:
            self._seen[of] /= 2
            self._right[of] /= 2
        if self.all_answers is not None:
            self.all_answers.note(num_matched, is_right=is_right)

    def chances(self, num_matched: int, num_tokens: int) -> list[float]:
        """Return the chance that a draft is right up to each of its tokens; it never rises."""
        return list(accumulate((self.chance(num_matched + i) for i in range(num_tokens)), mul))

    def chance(self, num_matched: int) -> float:
        """Return the chance that the token behind so many that agree is right, if they were."""
        before, weight, of = USUAL_CHANCE, USUAL_WEIGHT, _class_of(num_matched)
        if self.all_answers is not None:
            before, weight = self.all_answers.chance(num_matched), ENGINE_WEIGHT
        return (self._right[of] + weight * before) / (self._seen[of] + weight)


def _class_of(num_matched: int) -> int:
    return sum(num_matched >= end for end in _CLASS_ENDS)


@dataclass(frozen=True)
class StepCost:
    """What steps take, in any one unit.

    Attributes:
        plain: a step without drafts.
        drafted: one of as many tokens that is not replayed from a graph.
        token: what each drafted token adds.
    """

    plain: float = 1.0
    drafted: float = 1.0
    token: float = UNKNOWN_SHARE


def draft_lengths(chances: Sequence[Sequence[float]], cost: StepCost) -> list[int]:
    """Choose how many tokens of each answer's draft to try.

    Args:
        chances: by answer, of each token of its draft: that it and all before it are right; none
            for an answer without a draft.
        cost: of the step.
    """
    drafted = sorted((-chance, answer) for answer, its in enumerate(chances) for chance in its)
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
