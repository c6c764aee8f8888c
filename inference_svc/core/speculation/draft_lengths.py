"""How many drafted tokens a step is to try: as many as make it yield more tokens a second. Pure.

A step computes a token of each answer under way. With drafts it computes more, and yields those
that turn out right. A drafted token costs what a token adds to a step, and yields the chance that
it, and all before it, are right. The tokens of all drafts are taken in order of their chances, as
long as that raises

    (answers + Σ chances) / (seconds of the step + Σ seconds added)

So drafts are long where an answer copies, short where it is uncertain, and there are none where
arithmetic is what takes the time: with many answers at once. If a step without drafts would be
replayed from a graph, and one with drafts cannot be, that counts too.

*Source:* goodput of speculative decoding: Liu et al., "SmartSpec", 2024.
"""

from collections.abc import Sequence
from dataclasses import dataclass

UNKNOWN_SHARE = 1 / 16  # of a step that a token adds, until it was measured


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
