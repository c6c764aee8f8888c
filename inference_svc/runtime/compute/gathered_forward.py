"""GatheredForward: attention over history and new tokens, gathered from all sequences.

For models that transform what they cache before they attend to it (latent attention), and for
models whose own attention runs, batched under a mask or one sequence at a time. The price is a copy
of all tokens per layer and step, except for a lone sequence: it gets views.

The model receives the sequences one after another, each one's new tokens behind its history; or all
new tokens behind all histories (`Calibration.is_new_last`). The chunks of a step are called *parts*
here.

`LatentForward` gathers less. To expand the latents of a whole history into keys and values takes as
long for one new token as for a hundred. So parts with few new tokens, above all decoding ones,
attend over latents (`attention/latents.py`), and the model does not receive their tokens at all.
Parts with many new tokens are expanded by the model, as in any `GatheredForward`. Models whose
layers choose tokens by an index (DSA) pass the chosen tokens of all parts with each attention call.
Parts with more tokens than are chosen attend over the chosen latents.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference_svc.runtime.attention.latents import Expansion, attend_absorbed, attend_chosen
from inference_svc.runtime.attention.softmax_attention import AttentionOptions, Masks, attend
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import StepForward
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.layer_tensors import side_by_side
from inference_svc.runtime.memory import copy_to_device
from inference_svc.runtime.model.capture import CHOSEN
from inference_svc.runtime.positions.recipes import Calibration


class GatheredForward(StepForward):
    """A forward whose attention reads tensors gathered from all sequences."""

    def __init__(
        self,
        calibration: Calibration,
        chunks: Sequence[Chunk],
        clock: StepClock | None,
    ) -> None:
        """View the KV of each part up to its last token."""
        super().__init__(calibration, chunks, StepPlaces.of(chunks), clock)
        self._lengths = [chunk.end_token for chunk in chunks]
        self._expanded: Sequence[int] = range(len(chunks))  # parts whose KV the model receives
        self._is_new_last = calibration.is_new_last and len(chunks) > 1
        ends = [chunk.kv.num_tokens if self._is_new_last else chunk.end_token for chunk in chunks]
        cut = list(zip((chunk.kv for chunk in chunks), ends, strict=True))
        self._keys = [kv.keys.cut(0, end) for kv, end in cut]
        self._values = [kv.values.cut(0, end) for kv, end in cut]
        self._indexes = [kv.indexes.cut(0, end) for kv, end in cut if kv.indexes is not None]
        self._masks: Masks = {}

    def update_cache(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens as `StepForward` does, and gather the expanded parts.

        Returns:
            Keys and values of all tokens of the expanded parts, [1, kv_heads, sum_kv, dim] both.
        """
        super().update_cache(layer_index, key, value)
        for gate in self._gates:
            gate.wait(layer_index)
        if not self._expanded:
            return key[:, :, :1], value[:, :, :1]  # models need one token at least
        keys, values = (
            self._join([cuts[part] for part in self._expanded], layer_index, new)
            for cuts, new in ((self._keys, key), (self._values, value))
        )
        return keys, values

    def update_index(self, layer_index: int, index: Tensor) -> Tensor:
        """Write as `StepForward` does; return all parts' index keys, [1, sum_kv, index_dim]."""
        super().update_index(layer_index, index)
        for gate in self._gates:
            gate.wait(layer_index)
        return self._join(self._indexes, layer_index, index.unsqueeze(1))[:, 0]

    def history_positions(self) -> Tensor | None:
        """Return the positions of all histories' tokens, [history tokens]; None: there are none.

        Raises:
            AssertionError: the histories do not all stand before the new tokens.
        """
        if len(self._chunks) > 1 and not self._is_new_last:
            raise AssertionError("new tokens stand among those of other sequences")
        before = [position for chunk in self._chunks for position in range(chunk.kv.num_tokens)]
        return copy_to_device(self._chunks[0].kv.device, torch.tensor(before)) if before else None

    def _join(self, cuts: Sequence[Sequence[Tensor]], layer_index: int, new: Tensor) -> Tensor:
        """Concatenate one layer's tokens of all parts, [1, kv_heads, sum_kv, dim]."""
        if len(cuts) == 1:
            return cuts[0][layer_index]
        last = [new] if self._is_new_last else []
        return torch.cat([*(cut[layer_index] for cut in cuts), *last], dim=2)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to the keys and values that the model made of its KV.

        Args:
            query: [1, heads, tokens, head_dim].
            key: [1, kv_heads, sum_kv, head_dim].
            value: [1, kv_heads, sum_kv, value_dim].
            _mask: None: our attention has no mask function.
            options: the model's arguments of the call (scale, softcap, sinks).

        Returns:
            [1, tokens, heads, value_dim]
        """
        _, call_options = self._next_call(options)
        queries = query.split_with_sizes(self._sizes, 2)
        keys = key.split_with_sizes(self._lengths, 2)
        values = value.split_with_sizes(self._lengths, 2)
        attended = [
            attend_uneven(*part, call_options, self._masks).transpose(1, 2)
            for part in zip(queries, keys, values, strict=True)
        ]
        if self._is_scored:
            self._report(queries, keys, call_options)
        return torch.cat(attended, dim=1)


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


def attend_uneven(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, masks: Masks
) -> Tensor:
    """Attend like `softmax_attention.attend` with keys and values that may differ in width.

    On the CPU the narrower ones are padded with zeros: torch's fast kernel needs equal widths, and
    its other kernels take 2 to 15 times as long.

    Args:
        query: [1, heads, tokens, head_dim].
        keys: [1, kv_heads, length, head_dim].
        values: [1, kv_heads, length, value_dim].
        options: scale, softcap, sinks and window of the call.
        masks: cached masks, as `softmax_attention.attend` takes them.

    Returns:
        [1, heads, tokens, value_dim]
    """
    key_dim, value_dim = query.shape[3], values.shape[3]
    if key_dim == value_dim or query.device.type != "cpu":
        return attend(query, keys, values, options, masks)
    # The default scale depends on the width of the keys as they are without padding.
    scaled = options._replace(scale=key_dim**-0.5 if options.scale is None else options.scale)
    if key_dim > value_dim:
        values = pad(values, (0, key_dim - value_dim))
        return attend(query, keys, values, scaled, masks)[..., :value_dim]
    query, keys = (pad(narrow, (0, value_dim - key_dim)) for narrow in (query, keys))
    return attend(query, keys, values, scaled, masks)


def block_causal_mask(
    chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device, *, new_last: bool = False
) -> Tensor:
    """Return an additive mask under which each token sees its own sequence up to itself.

    Args:
        chunks: the chunks of the step.
        dtype: element type of the mask.
        device: device of the mask.
        new_last: whether all new tokens stand behind all histories (`Calibration.is_new_last`).

    Returns:
        [1, 1, tokens, sum_kv], with keys in the order of `GatheredForward`.
    """
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    num_keys = sum(chunk.end_token for chunk in chunks)
    mask = torch.full((num_tokens, num_keys), torch.finfo(dtype).min, dtype=dtype, device=device)
    token = key = 0
    for chunk in chunks:
        size, history = len(chunk.token_ids), chunk.kv.num_tokens
        new = num_keys - num_tokens + token if new_last else key + history
        block = causal_block(size, chunk.end_token, dtype, device)
        mask[token : token + size, key : key + history] = block[:, :history]
        mask[token : token + size, new : new + size] = block[:, history:]
        token, key = token + size, key + history + (0 if new_last else size)
    return mask[None, None]


def causal_block(size: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an additive mask, [size, length]: the last `size` tokens see keys up to themselves.

    Hidden keys get the least finite number, as in Transformers' own masks: some models read the
    mask as a table of the keys to hide.
    """
    hidden = torch.finfo(dtype).min
    block = torch.full((size, length), hidden, dtype=dtype, device=device)
    return block.triu(length - size + 1)
