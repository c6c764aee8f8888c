"""The judge of sessions whose contexts lost tokens: the stock model, fed by hand.

Rows of keys before RoPE and of values are taken from the stock model's own projections. Before each
forward the keys of the context are embedded, by the model's own rotary module, at their present
positions: a discard only removes rows. Everything is teacher-forced over the session as
the service recorded it: its tokens, its discards, and how much of each history was reused: the rest
is computed anew over the reused rows. Tokens kept behind an edit have the rows of the session that
they were taken from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from shared.pb.inference.v1 import inference_pb2 as pb
from tests.oracle import TIE_GAP, Verdict

Ranges = Sequence[tuple[int, int]]


@dataclass
class Rows:
    """The kept part of a context: its tokens, and the first ones' keys before RoPE and values.

    `keys`, `values`: per layer [rows, kv_heads * head_dim].
    """

    keys: list[Tensor]
    values: list[Tensor]
    token_ids: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Return the number of tokens that the model was fed."""
        return self.keys[0].shape[0]

    def cut(self, num_rows: int) -> None:
        """Drop the later rows; their tokens stay."""
        self.keys = [rows[:num_rows] for rows in self.keys]
        self.values = [rows[:num_rows] for rows in self.values]

    def discard(self, ranges: Ranges) -> None:
        """Remove tokens and their rows."""
        gone = {position for start, end in ranges for position in range(start, end)}
        kept = [at for at in range(len(self.token_ids)) if at not in gone]
        kept_rows = torch.tensor([at for at in kept if at < self.num_rows], dtype=torch.long)
        self.keys = [rows[kept_rows] for rows in self.keys]
        self.values = [rows[kept_rows] for rows in self.values]
        self.token_ids = [self.token_ids[at] for at in kept]


class TruncationOracle:
    """A stock Llama in fp32 with eager attention; `bos_id` is its tokenizer's begin token."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        config = self._model.config
        self.bos_id = AutoTokenizer.from_pretrained(model_dir).bos_token_id
        self._heads_shape = (config.num_key_value_heads, config.head_dim)
        self._seen: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
        for layer in self._model.model.layers:
            for name, seen in self._seen.items():
                projection = getattr(layer.self_attn, name)
                projection.register_forward_hook(
                    lambda _module, _inputs, output, seen=seen: seen.append(output[0])
                )

    def judge(
        self,
        session: pb.Session,
        *,
        coupled: bool = False,
        sources: Mapping[str, Rows] = MappingProxyType({}),
    ) -> Verdict:
        """Judge a session read with its turns; `coupled`: a discard voids all that follows."""
        _, gaps = self.followed(session, coupled=coupled, sources=sources)
        differing = tuple(index for index, gap in enumerate(gaps) if gap >= TIE_GAP)
        return Verdict(len(gaps), sum(0 < gap < TIE_GAP for gap in gaps), differing)

    @torch.no_grad()
    def followed(
        self,
        session: pb.Session,
        *,
        coupled: bool = False,
        sources: Mapping[str, Rows] = MappingProxyType({}),
    ) -> tuple[Rows, list[float]]:
        """Feed a session; return its rows, and each answered token's distance from the best one.

        `sources`: rows of the sessions from which tokens were kept.
        """
        empty = [torch.zeros(0, self._heads_shape[0] * self._heads_shape[1])]
        num_layers = len(self._model.model.layers)
        rows = Rows(empty * num_layers, empty * num_layers)
        gaps: list[float] = []
        for turn in session.turn_records:
            gaps += self._gaps(rows, session, turn, coupled, sources)
        for discard in _discards(session, session.turns):
            _apply(rows, discard, coupled)
        assert rows.token_ids == list(session.context_ids), "the session shows another context"
        return rows, gaps

    def _gaps(
        self,
        rows: Rows,
        session: pb.Session,
        turn: pb.TurnRecord,
        coupled: bool,
        sources: Mapping[str, Rows],
    ) -> list[float]:
        """Return the distance of each token of a turn's answer from the best one."""
        discards = _discards(session, turn.turn)
        while discards and not discards[0].after_tokens:
            _apply(rows, discards.pop(0), coupled)
        rows.cut(turn.usage.reused_tokens)
        rows.token_ids += turn.input_ids
        for graft in turn.grafts:
            rows.cut(graft.seam)
            self._feed(rows, rows.token_ids[rows.num_rows : graft.seam])
            _take_over(rows, graft, sources[graft.session_id])
        gaps: list[float] = []
        while len(gaps) < len(turn.output_ids):
            end = len(turn.output_ids)
            if discards:
                end = min(end, discards[0].after_tokens - len(turn.input_ids))
            gaps += self._answer(rows, turn.output_ids[len(gaps) : end])
            while discards and discards[0].after_tokens == len(turn.input_ids) + end:
                _apply(rows, discards.pop(0), coupled)
        assert not discards, "a discard after the end of its turn"
        return gaps

    def _answer(self, rows: Rows, output_ids: Sequence[int]) -> list[float]:
        """Feed all but the last of these tokens, behind any not fed before; return their gaps."""
        new_ids = [*rows.token_ids[rows.num_rows :], *output_ids[:-1]]
        rows.token_ids += output_ids
        logits = self._feed(rows, new_ids)[-len(output_ids) :]  # [output_ids, vocab]
        chosen = logits.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
        gaps: list[float] = (logits.max(dim=1).values - chosen).tolist()
        return gaps

    def _feed(self, rows: Rows, new_ids: Sequence[int]) -> Tensor:
        """Compute rows of the next tokens over the existing ones; return [new_ids, vocab]."""
        start = rows.num_rows
        if not new_ids:
            return torch.zeros(0, self._model.config.vocab_size)
        positions = torch.arange(start, start + len(new_ids))[None]
        for seen in self._seen.values():
            seen.clear()
        cache = self._cache(rows)
        output = self._model(
            torch.tensor([list(new_ids)]), past_key_values=cache, position_ids=positions
        )
        rows.keys = [torch.cat(pair) for pair in zip(rows.keys, self._seen["k_proj"], strict=True)]
        pairs = zip(rows.values, self._seen["v_proj"], strict=True)
        rows.values = [torch.cat(pair) for pair in pairs]
        logits: Tensor = output.logits[0]
        return logits

    def _cache(self, rows: Rows) -> DynamicCache:
        """Return the context's rows as the stock model caches them, at their present positions."""
        cache = DynamicCache()
        if not rows.num_rows:
            return cache
        positions = torch.arange(rows.num_rows)[None]
        cos, sin = self._model.model.rotary_emb(rows.keys[0], positions)
        for index, pair in enumerate(zip(rows.keys, rows.values, strict=True)):
            key, value = (part.view(1, -1, *self._heads_shape).transpose(1, 2) for part in pair)
            _, embedded = apply_rotary_pos_emb(key, key, cos, sin)
            cache.update(embedded, value.contiguous(), index)
        return cache


def _discards(session: pb.Session, turn: int) -> list[pb.Discarded]:
    return [discard for discard in session.discards if discard.turn == turn]


def _take_over(rows: Rows, graft: pb.Graft, source: Rows) -> None:
    """Append rows of another session, as they are before RoPE."""
    end = graft.source_start + graft.num_tokens
    taken = source.token_ids[graft.source_start : end]
    assert rows.token_ids[graft.seam :][: graft.num_tokens] == taken, "they are the same tokens"
    for ours, theirs in ((rows.keys, source.keys), (rows.values, source.values)):
        ours[:] = [
            torch.cat((one[: graft.seam], other[graft.source_start : end]))
            for one, other in zip(ours, theirs, strict=True)
        ]


def _apply(rows: Rows, discard: pb.Discarded, coupled: bool) -> None:
    ranges = [(found.start, found.end) for found in discard.ranges]
    if coupled:
        rows.cut(min(rows.num_rows, ranges[0][0]))
    rows.discard(ranges)
