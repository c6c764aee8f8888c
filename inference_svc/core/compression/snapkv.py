"""SnapKV: of the prompt stays what its last tokens attended to, with its neighbours.

The queries of an observation window at the prompt's end vote for the tokens before it. Votes are
pooled over neighbours, so that words and records survive whole rather than in pieces. The window
itself always stays, and so does what came after it: the answer, judged by the next turn's window.

Two things differ from the paper: one vote over all heads and layers (see `policy.py`), and the
budget is a part of the context rather than a number of tokens.

*Source:* "SnapKV: LLM Knows What You are Looking for Before Generation" (Li et al., NeurIPS 2024);
window of 32 and pooling by maximum over 7 as in its LongBench experiments.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from inference_svc.core.compression.policy import Needs, all_but, free_tokens, highest, num_kept
from inference_svc.core.discards import Range


@dataclass(frozen=True)
class SnapKV:
    """See the module docstring.

    Attributes:
        window_tokens: queries at the prompt's end that vote.
        pool_tokens: neighbours whose best score a token gets, itself in the middle; odd.
    """

    keep_ratio: float
    window_tokens: int = 32
    pool_tokens: int = 7

    name: ClassVar[str] = "snapkv"
    needs: ClassVar[Needs] = "window"

    def drop(
        self, num_tokens: int, scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """See the protocol; the window ends with the last score."""
        assert scores is not None, "a turn computes its prompt's last token at least"
        free = free_tokens(num_tokens, protected)
        first_kept = max(0, len(scores) - self.window_tokens)
        older = [position for position in free if position < first_kept]
        num_newer = len(free) - len(older)
        budget = num_kept(self.keep_ratio, len(free)) - num_newer
        pooled = pool(scores[:first_kept], self.pool_tokens)
        return all_but(highest(older, pooled, budget), older, num_tokens)


def pool(scores: Sequence[float], width: int) -> list[float]:
    """The highest score, none being negative, among the `width` neighbours of each."""
    edge = [0.0] * (width // 2)
    padded = [*edge, *scores, *edge]
    shifted = (padded[offset : offset + len(scores)] for offset in range(width))
    return [max(near) for near in zip(*shifted, strict=True)]
