"""The judge of token identity: the stock model, run the plain way on a session's whole transcript.

One teacher-forced forward over all tokens of a session gives, at each position, what greedy
recomputation would say next. An output token must be that token, or the difference must fall where
the two best logits are a tie within fp32 noise (gap < 1e-4), and ties must be rare.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TIE_GAP = 1e-4


@dataclass(frozen=True)
class Verdict:
    """Output tokens judged, those that differ at a tie, positions of those that differ for real."""

    num_tokens: int
    num_ties: int
    differing: tuple[int, ...]

    @property
    def is_identical(self) -> bool:
        """No difference but for ties, and at most one tie."""
        return not self.differing and self.num_ties <= 1


class Oracle:
    """A stock Transformers model in fp32 with eager attention and no cache."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def judge(self, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Verdict:
        """Judge a session given as (input ids, output ids) of each turn in order."""
        token_ids: list[int] = []
        outputs: list[int] = []  # positions of output tokens
        for input_ids, output_ids in turns:
            token_ids += input_ids
            outputs += range(len(token_ids), len(token_ids) + len(output_ids))
            token_ids += output_ids
        logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[
            0
        ]  # [tokens, vocab]
        best = logits.topk(2)
        num_ties, differing = 0, []
        for position in outputs:
            row = position - 1
            if int(best.indices[row, 0]) == token_ids[position]:
                continue
            gap = float(best.values[row, 0] - logits[row, token_ids[position]])
            if gap < TIE_GAP:
                num_ties += 1
            else:
                differing.append(position)
        return Verdict(len(outputs), num_ties, tuple(differing))
