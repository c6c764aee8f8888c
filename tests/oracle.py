"""The judge of token identity: the stock model, run without reuse on a session's whole transcript.

One teacher-forced forward over all tokens of a session gives, at each position, the token
of greedy recomputation. An output token must be that token, or the difference must fall where
the two best logits are a tie within fp32 noise (gap < 1e-4), and ties must be rare.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from shared.pb.inference.v1 import inference_pb2 as pb

TIE_GAP = 1e-4


@dataclass(frozen=True)
class Verdict:
    """Output tokens judged, those that differ at a tie, positions of those that really differ."""

    num_tokens: int
    num_ties: int
    differing: tuple[int, ...]

    @property
    def is_identical(self) -> bool:
        """Return whether no token differs but at ties, and at most one does there."""
        return not self.differing and self.num_ties <= 1


class Oracle:
    """A stock Transformers model in fp32 with eager attention and no cache."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def judge(self, turns: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Verdict:
        """Judge a session given as (input ids, output ids) of each turn in order."""
        token_ids: list[int] = []
        outputs: list[int] = []  # positions of the output tokens
        for input_ids, output_ids in turns:
            token_ids += input_ids
            outputs += range(len(token_ids), len(token_ids) + len(output_ids))
            token_ids += output_ids
        return self._verdict([(token_ids, position) for position in outputs])

    def judge_coupled(self, session: pb.Session) -> Verdict:
        """Judge a session whose discards void all KV behind them.

        Each token of an answer must be the model's next token for the context at that time.
        Between two discards the context only grows, and is run once.
        """
        context: list[int] = []
        said: list[tuple[list[int], int]] = []
        for turn in session.turn_records:
            tokens = [*turn.input_ids, *turn.output_ids]
            discards = [discard for discard in session.discards if discard.turn == turn.turn]
            for number, token in enumerate(tokens):
                while discards and discards[0].after_tokens == number:
                    context = _without(context, discards.pop(0))
                context.append(token)
                if number >= len(turn.input_ids):
                    said.append((context, len(context) - 1))
            for discard in discards:
                context = _without(context, discard)
        return self._verdict(said)

    @torch.no_grad()
    def _verdict(self, said: Sequence[tuple[list[int], int]]) -> Verdict:
        """Judge tokens, each at a position of its context; run equal contexts once."""
        outputs = [position for _, position in said]
        num_ties, differing = 0, []
        logits, seen = torch.empty(0), None
        for context, position in said:
            if context is not seen:
                logits = self._model(torch.tensor([context]), use_cache=False).logits[0]
                seen = context  # [tokens, vocab]
            best = logits[position - 1].topk(2)
            if int(best.indices[0]) == context[position]:
                continue
            gap = float(best.values[0] - logits[position - 1, context[position]])
            if gap < TIE_GAP:
                num_ties += 1
            else:
                differing.append(position)
        return Verdict(len(outputs), num_ties, tuple(differing))


def _without(context: list[int], discard: pb.Discarded) -> list[int]:
    gone = {at for found in discard.ranges for at in range(found.start, found.end)}
    return [token for at, token in enumerate(context) if at not in gone]
