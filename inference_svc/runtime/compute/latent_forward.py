"""LatentForward: attention over latents, or over keys and values expanded from them, by part.

To expand the latents of a whole history into keys and values takes as long for one new token as for
a hundred. So parts with few new tokens, above all decoding ones, attend over latents
(`attention/latents.py`), and the model does not receive their tokens at all. Parts with many new
tokens are expanded by the model, as in a `GatheredForward`.

Models whose layers choose tokens by an index (DSA) pass the chosen tokens of all parts with each
attention call. Parts with more tokens than are chosen attend over the chosen latents.
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
    """A forward of a model with latent attention (MLA)."""

    def __init__(
        self, calibration: Calibration, chunks: Sequence[Chunk], clock: StepClock | None
    ) -> None:
        """Plan which parts attend over latents."""
        super().__init__(calibration, chunks, clock)
        self._expansions = calibration.expansions
        some = self._expansions[0]  # all layers have the same sizes
        self._expanded = [
            part
            for part, (size, length) in enumerate(zip(self._sizes, self._lengths, strict=True))
            if not some.pays(size, length)
        ]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to its latents, or to the keys and values expanded from them.

        Args:
            query: [1, heads, tokens, key_dim], the parts one after another.
            key: [1, heads, sum_kv, key_dim] of the expanded parts.
            value: [1, heads, sum_kv, value_dim] of the expanded parts.
            _mask: not read.
            options: the model's arguments of the call (scale, softcap, sinks, chosen tokens).

        Returns:
            [1, tokens, heads, value_dim]
        """
        expansion = self._expansions[self._num_attended]
        call, call_options = self._next_call(options)
        if call_options.scale is None:
            call_options = call_options._replace(scale=query.shape[3] ** -0.5)
        queries = query.split_with_sizes(self._sizes, 2)
        chosen = self._chosen_tokens(options.get(CHOSEN))
        # Without expanded parts the model has expanded one placeholder token (`update_cache`), to
        # which no part attends.
        lengths = [self._lengths[part] for part in self._expanded] or [1]
        keys, values = key.split_with_sizes(lengths, 2), value.split_with_sizes(lengths, 2)
        attended = {
            part: attend_uneven(queries[part], part_keys, part_values, call_options, self._masks)
            for part, part_keys, part_values in zip(self._expanded, keys, values, strict=False)
            if part not in chosen
        }
        # A part with chosen tokens attends over latents: later layers need not expand it.
        self._expanded = [part for part in self._expanded if part not in chosen]
        latent_parts = [part for part in range(len(queries)) if part not in attended]
        attended |= self._attend_latents(
            latent_parts, queries, chosen, call.layer_index, expansion, call_options
        )
        if self._is_scored:
            self._report_absorbed(queries, call.layer_index, expansion, call_options)
        return torch.cat([attended[part].transpose(1, 2) for part in range(len(queries))], dim=1)

    def _attend_latents(
        self,
        parts: Sequence[int],
        queries: Sequence[Tensor],
        chosen: Mapping[int, Tensor],
        layer_index: int,
        expansion: Expansion,
        options: AttentionOptions,
    ) -> dict[int, Tensor]:
        """Attend some parts over latents; return [1, heads, tokens, value_dim] by part."""
        if not parts:
            return {}
        sizes = [self._sizes[part] for part in parts]
        absorbed = expansion.absorb(torch.cat([queries[part] for part in parts], dim=2))
        attended = [
            attend_absorbed(query, self._latents(part, layer_index), options, self._masks)
            if part not in chosen
            else attend_chosen(query, self._latents(part, layer_index), chosen[part], options)
            for part, query in zip(parts, absorbed.split_with_sizes(sizes, 2), strict=True)
        ]
        values = expansion.values_of(torch.cat(attended, dim=2))
        return dict(zip(parts, values.split_with_sizes(sizes, 2), strict=True))

    def _latents(self, part: int, layer_index: int) -> Tensor:
        """Return a part's latents and rotated keys, [1, 1, length, latent_dim + rotated_dim]."""
        return side_by_side(self._keys[part][layer_index], self._values[part][layer_index])

    def _chosen_tokens(self, indices: Tensor | None) -> dict[int, Tensor]:
        """Return by part the positions of its chosen tokens, [tokens, chosen].

        Only of parts with more tokens than are chosen: of other parts all tokens are.

        Args:
            indices: [1, tokens, chosen] indices into the tokens of all parts in a row; None: the
                layer has no index.
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
        options: AttentionOptions,
    ) -> None:
        """Report the call to score keepers as one over latents, also where parts were expanded.

        Score keepers hold queries across steps and compare them with the last step's keys, so all
        steps have to report in the same form.
        """
        for part, (chunk, query) in enumerate(zip(self._chunks, queries, strict=True)):
            if chunk.scores is not None:
                latents = self._latents(part, layer_index)
                absorbed, first = expansion.absorb(query), chunk.kv.num_tokens
                chunk.scores.note(self._num_attended - 1, absorbed[0], latents[0], options, first)
