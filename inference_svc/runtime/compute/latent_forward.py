"""LatentForward: attends to latents, or to what the model makes of them, part by part.

Making keys and values of a whole history takes as long for one new token as for a hundred. So parts
of few tokens, decoding above all, attend over latents (`attention/latents.py`), and the model is
not given their tokens at all; those of many it makes keys and values of, as in a `GatheredForward`.

Models whose layers choose by an index (DSA) say at each attention call which tokens they have
chosen, of all parts together. Parts that are longer than that attend over the chosen latents.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference_svc.runtime.attention.latents import Expansion, attend_absorbed, attend_chosen
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.gathered_forward import GatheredForward, attend_uneven
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.layer_tensors import side_by_side
from inference_svc.runtime.model.capture import CHOSEN
from inference_svc.runtime.positions.recipes import Calibration


class LatentForward(GatheredForward):
    """See the module docstring."""

    def __init__(
        self, calibration: Calibration, chunks: Sequence[Chunk], clock: StepClock | None
    ) -> None:
        """Plan which parts attend over latents."""
        super().__init__(calibration, chunks, clock)
        self._expansions = calibration.expansions
        some = self._expansions[0]
        self._handed = [
            part
            for part, (size, length) in enumerate(zip(self._sizes, self._lengths, strict=True))
            if not some.pays(size, length)
        ]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its latents, or to what the model made of them.

        Args:
            query: [1, heads, tokens, key_dim], the parts one after another.
            key: [1, heads, sum_kv, key_dim], of the parts that the model was given.
            value: [1, heads, sum_kv, value_dim].
            _mask: None, or the one that the model was given: not read.
            options: the model's arguments of the call (scale, softcap, sinks, chosen tokens).

        Returns:
            [1, tokens, heads, value_dim]
        """
        expansion = self._expansions[self._num_attended]
        call, asked = self._next_call(options)
        if asked.scale is None:
            asked = asked._replace(scale=query.shape[3] ** -0.5)
        queries = query.split_with_sizes(self._sizes, 2)
        chosen = self._chosen(options.get(CHOSEN))
        # If it was given none, what it has made of one token is nobody's.
        lengths = [self._lengths[part] for part in self._handed] or [1]
        keys, values = key.split_with_sizes(lengths, 2), value.split_with_sizes(lengths, 2)
        attended = {
            part: attend_uneven(queries[part], its_keys, its_values, asked, self._masks)
            for part, its_keys, its_values in zip(self._handed, keys, values, strict=False)
            if part not in chosen
        }
        self._handed = [part for part in self._handed if part not in chosen]
        others = [part for part in range(len(queries)) if part not in attended]
        attended |= self._over_latents(others, queries, chosen, call.layer_index, expansion, asked)
        if self._is_scored:
            self._report_absorbed(queries, call.layer_index, expansion, asked)
        return torch.cat([attended[part].transpose(1, 2) for part in range(len(queries))], dim=1)

    def _over_latents(
        self,
        parts: Sequence[int],
        queries: Sequence[Tensor],
        chosen: Mapping[int, Tensor],
        layer_index: int,
        expansion: Expansion,
        asked: AttentionOptions,
    ) -> dict[int, Tensor]:
        """Attend some parts over latents; returns [1, heads, tokens, value_dim] by part."""
        if not parts:
            return {}
        sizes = [self._sizes[part] for part in parts]
        absorbed = expansion.absorb(torch.cat([queries[part] for part in parts], dim=2))
        attended = [
            attend_absorbed(query, self._latents(part, layer_index), asked, self._masks)
            if part not in chosen
            else attend_chosen(query, self._latents(part, layer_index), chosen[part], asked)
            for part, query in zip(parts, absorbed.split_with_sizes(sizes, 2), strict=True)
        ]
        values = expansion.values_of(torch.cat(attended, dim=2))
        return dict(zip(parts, values.split_with_sizes(sizes, 2), strict=True))

    def _latents(self, part: int, layer_index: int) -> Tensor:
        """Return a part's latents and rotated parts, [1, 1, length, latent_dim + rotated_dim]."""
        return side_by_side(self._keys[part][layer_index], self._values[part][layer_index])

    def _chosen(self, indices: Tensor | None) -> dict[int, Tensor]:
        """Return by part which of its tokens are chosen, [tokens, chosen].

        Only of parts that are longer than what is chosen: of others all are.

        Args:
            indices: [1, tokens, chosen], of all parts' tokens in a row; None: there is no index.
        """
        if indices is None:
            return {}
        rows = indices[0].split_with_sizes(self._sizes)
        firsts = accumulate(self._lengths, initial=0)
        return {
            part: rows[part].long() - first
            for part, (first, length) in enumerate(zip(firsts, self._lengths, strict=False))
            if length > indices.shape[2]
        }

    def _report_absorbed(
        self,
        queries: Sequence[Tensor],
        layer_index: int,
        expansion: Expansion,
        asked: AttentionOptions,
    ) -> None:
        """Report the call to score keepers: always as one over latents, however it was made.

        They keep queries from one step to another, and compare them with keys of the last.
        """
        for part, (chunk, query) in enumerate(zip(self._chunks, queries, strict=True)):
            if chunk.scores is not None:
                latents = self._latents(part, layer_index)
                absorbed, first = expansion.absorb(query), chunk.kv.num_tokens
                chunk.scores.note(self._num_attended - 1, absorbed[0], latents[0], asked, first)
