"""H2O: the tokens that got most attention of all queries so far stay, and the latest ones.

Half of the budget is for the latest tokens, which had few queries to be seen by, and half for the
heavy hitters among the others. Tokens without a score count among the latest.

The paper evicts one token at each step of the answer; here all go at once when the turn is over,
with the attention summed up to then. History that was loaded rather than computed brings no scores
of earlier turns: its tokens are judged by this turn's queries.

*Source:* "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(Zhang et al., NeurIPS 2023).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from inference_svc.core.compression.policy import Needs, all_but, free_tokens, highest, num_kept
from inference_svc.core.discards import Range


@dataclass(frozen=True)
class HeavyHitters:
    """See the module docstring.

    Attributes:
        recent_share: of the budget that the latest tokens get, in [0, 1].
    """

    keep_ratio: float
    recent_share: float = 0.5

    name: ClassVar[str] = "h2o"
    needs: ClassVar[Needs] = "accumulated"
    window_tokens: ClassVar[int] = 0

    def drop(
        self, num_tokens: int, scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """See the protocol."""
        assert scores is not None, "a turn computes its prompt's last token at least"
        free = free_tokens(num_tokens, protected)
        budget = num_kept(self.keep_ratio, len(free))
        num_unscored = sum(position >= len(scores) for position in free)
        num_recent = max(num_unscored, round(budget * self.recent_share))
        older = free[: max(0, len(free) - num_recent)]
        return all_but(highest(older, scores, budget - num_recent), older, num_tokens)
