"""Where a step's new tokens go in working KV: cut once a step, written once a layer.

Written for few calls: all sequences' tokens of a layer are copied in one.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import SequenceKv


class NewTokens(Protocol):
    """Places of new tokens, of all sequences of a step."""

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens.

        Args:
            layer_index: the layer.
            key: [1, kv_heads, tokens, head_dim], after RoPE, the sequences' one after another.
            value: [1, kv_heads, tokens, value_dim].
        """

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write index keys, [1, 1, tokens, index_dim], of a layer that has them."""


def new_tokens(appended: Sequence[tuple[SequenceKv, int]]) -> NewTokens:
    """Cut the places of so many new tokens behind each sequence's; all of them are of one kind."""
    paged = [(kv, number) for kv, number in appended if isinstance(kv, PagedKv)]
    if not paged:
        return _SideBySide(appended)
    region = paged[0][0]
    by_group = [
        [
            slot
            for kv, number in paged
            for slot in kv.tables.by_group[group].slots_of(kv.num_tokens, number)
        ]
        for group in range(len(region.tables.by_group))
    ]
    return NewOnPages(region, [Places(slots, region.device) for slots in by_group])


class _SideBySide:
    """Tokens of sequences that have memory of their own."""

    def __init__(self, appended: Sequence[tuple[SequenceKv, int]]) -> None:
        self._sizes = [num_tokens for _, num_tokens in appended]
        # Per layer, keys and then values of each sequence, [1, kv_heads, tokens, dim].
        self._places = list(
            zip(
                *[kv.keys.cut(kv.num_tokens, num_tokens) for kv, num_tokens in appended],
                *[kv.values.cut(kv.num_tokens, num_tokens) for kv, num_tokens in appended],
                strict=True,
            )
        )
        self._index_places = list(
            zip(
                *[
                    kv.indexes.cut(kv.num_tokens, num_tokens)
                    for kv, num_tokens in appended
                    if kv.indexes is not None
                ],
                strict=True,
            )
        )

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens; see the protocol."""
        sizes = self._sizes
        written = [*key.split_with_sizes(sizes, 2), *value.split_with_sizes(sizes, 2)]
        torch._foreach_copy_(self._places[layer_index], written)

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write a layer's index keys; see the protocol."""
        places = self._index_places[layer_index]
        torch._foreach_copy_(places, index.split_with_sizes(self._sizes, 2))


class NewOnPages:
    """Tokens that go to slots of one region: the one that this KV is in."""

    def __init__(self, kv: PagedKv, places: Sequence[Places]) -> None:
        """Store where the tokens go, by group of layers."""
        parts = (kv.keys, kv.values, kv.indexes)
        self._components = [tokens.slots for tokens in parts if tokens is not None]
        self._places = [places[group] for group in kv.tables.groups.group_of]

    def write(self, layer_index: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's new tokens; see the protocol."""
        keys, values = self._components[:2]
        places = self._places[layer_index]
        places.write(keys[layer_index], key[0].transpose(0, 1))
        places.write(values[layer_index], value[0].transpose(0, 1))

    def write_index(self, layer_index: int, index: Tensor) -> None:
        """Write a layer's index keys; see the protocol."""
        places = self._places[layer_index]
        places.write(self._components[2][layer_index], index[0].transpose(0, 1))
