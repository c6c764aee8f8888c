"""GatheredForward: attention over history and new tokens, gathered from all sequences.

For models that transform what they cache before they attend to it (latent attention), and for
models whose own attention runs, batched under a mask or one sequence at a time. The price is a copy
of all tokens per layer and step, except for a lone sequence: it gets views.

The model receives the sequences one after another, each one's new tokens behind its history; or all
new tokens behind all histories (`Calibration.is_new_last`). The chunks of a step are called *parts*
here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference_svc.runtime.attention.softmax_attention import AttentionOptions, Masks, attend
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import StepForward
from inference_svc.runtime.compute.step_places import StepPlaces
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.memory import copy_to_device
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
