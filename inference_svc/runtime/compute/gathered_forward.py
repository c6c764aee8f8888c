"""A forward whose attention gets history and new rows as tensors, gathered from the slabs.

For models that make something of what they cache before they attend to it (latent attention), and
for models whose own attention runs, batched under a mask or one sequence at a time. A copy of all
rows per layer and step is the price, except for a lone sequence: it gets views of its slab.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from inference_svc.runtime.attention.attention import AttentionOptions
from inference_svc.runtime.attention.softmax_attention import Masks, attend
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import StepForward, tell
from inference_svc.runtime.kv.copy_stream import StepClock
from inference_svc.runtime.positions.recipes import Calibration


class GatheredForward(StepForward):
    """See the module docstring."""

    def __init__(
        self, calibration: Calibration, chunks: Sequence[Chunk], clock: StepClock | None
    ) -> None:
        """Cut what each part's last token sees."""
        super().__init__(calibration, chunks, clock)
        self._chunks = chunks
        self._lengths = [chunk.end_token for chunk in chunks]
        self._keys = [chunk.slab.keys.cut(0, chunk.end_token) for chunk in chunks]
        self._values = [chunk.slab.values.cut(0, chunk.end_token) for chunk in chunks]
        self._masks: Masks = {}

    def cached(self, layer_index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the layer's new rows; return all rows of all parts, [1, heads, sum_kv, dim]."""
        super().cached(layer_index, key, value)
        for gate in self._gates:
            gate.wait(layer_index)
        return _joined(self._keys, layer_index), _joined(self._values, layer_index)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, _mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Attend each part to what the model made of its rows.

        Args:
            query: [1, heads, tokens, dim].
            key: [1, kv_heads, sum_kv, dim].
            value: [1, kv_heads, sum_kv, value_dim].
            _mask: none.
            options: of the call.

        Returns:
            [1, tokens, heads, value_dim]
        """
        asked = self._attention_calls[self._num_attended].options(options)
        self._num_attended += 1
        queries = query.split_with_sizes(self._sizes, 2)
        keys = key.split_with_sizes(self._lengths, 2)
        values = value.split_with_sizes(self._lengths, 2)
        attended = [
            attend_uneven(*part, asked, self._masks).transpose(1, 2)
            for part in zip(queries, keys, values, strict=True)
        ]
        if any(chunk.scores is not None for chunk in self._chunks):
            rows = [part[0] for part in keys]
            tell(self._chunks, self._num_attended - 1, queries, rows, asked)
        return torch.cat(attended, dim=1)


def attend_uneven(
    query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions, masks: Masks
) -> Tensor:
    """Attend as `softmax_attention.attend`, where keys and values may differ in width.

    On the CPU the narrower are filled up with zeros: the fast kernel wants equal widths, and what
    torch has for others takes 2 to 15 times as long.
    """
    key_dim, value_dim = query.shape[3], values.shape[3]
    if key_dim == value_dim or query.device.type != "cpu":
        return attend(query, keys, values, options, masks)
    asked = options._replace(scale=key_dim**-0.5 if options.scale is None else options.scale)
    if key_dim > value_dim:
        values = pad(values, (0, key_dim - value_dim))
        return attend(query, keys, values, asked, masks)[..., :value_dim]
    query, keys = (pad(rows, (0, value_dim - key_dim)) for rows in (query, keys))
    return attend(query, keys, values, asked, masks)


def block_causal_mask(chunks: Sequence[Chunk], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [1, 1, tokens, sum_kv], added to scores: each token sees its own part up to itself."""
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    num_rows = sum(chunk.end_token for chunk in chunks)
    mask = torch.full((num_tokens, num_rows), torch.finfo(dtype).min, dtype=dtype, device=device)
    token = row = 0
    for chunk in chunks:
        size, length = len(chunk.token_ids), chunk.end_token
        block = causal_block(size, length, dtype, device)
        mask[token : token + size, row : row + length] = block
        token, row = token + size, row + length
    return mask[None, None]


def causal_block(size: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [size, length], added to scores: the last `size` tokens see rows up to themselves.

    What is hidden gets the least finite number, as in Transformers' own masks: some models take the
    mask for a table of what to hide.
    """
    hidden = torch.finfo(dtype).min
    block = torch.full((size, length), hidden, dtype=dtype, device=device)
    return block.triu(length - size + 1)


def _joined(cuts: Sequence[Sequence[Tensor]], layer_index: int) -> Tensor:
    """Return one layer's rows of all parts, one after another."""
    if len(cuts) == 1:
        return cuts[0][layer_index]
    return torch.cat([cut[layer_index] for cut in cuts], dim=2)
