"""KVSlab: the working KV of one running sequence, contiguous per layer and head.

Keys and values are head-major: decode reads one head's rows after another, twice as fast from
memory as rows of all heads interleaved. Keys before RoPE are token-major like a block, since all
they are for is to be stored.

Owns tensors and two counters; knows nothing of blocks, sessions or models.

Invariants:
1. rows [0, num_tokens) of `keys` and `values` are what attention reads: keys after RoPE at position
   = row;
2. if `free_keys` is not None, its rows [save_from, num_tokens) hold the same keys before RoPE;
   `values` carry no position and serve both;
3. rows from num_tokens on are garbage: a failed step or load leaves the slab as it was.

The compute thread writes rows it appends; a copy thread may fill or read a slab whose sequence is
not running.
"""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shared.units import align_up

HUGE_PAGE_BYTES = 2 * 2**20


class LayerShape(NamedTuple):
    """Per-token shapes of one layer: (kv_heads, head_dim) and (kv_heads, value_dim)."""

    key: tuple[int, int]
    value: tuple[int, int]


class LayerRows:
    """One tensor per layer; layers of equal shape lie in one stack, to be cut at once."""

    def __init__(self, stacks: Sequence[tuple[Tensor, Sequence[int]]], token_dim: int) -> None:
        """Store the stacks.

        Args:
            stacks: (tensor [layers, ...], indices of these layers); together all layers.
            token_dim: the dimension of one layer's tensor that counts tokens.
        """
        self._stacks = stacks
        self._token_dim = token_dim
        self._num_layers = sum(len(indices) for _, indices in stacks)
        self.layers = self._spread([stack.unbind(0) for stack, _ in stacks])

    def __getitem__(self, layer_index: int) -> Tensor:
        return self.layers[layer_index]

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """View these tokens of every layer; half the cost of cutting them one by one."""
        dim = self._token_dim + 1
        return self._spread(
            [stack.narrow(dim, first, num_tokens).unbind(0) for stack, _ in self._stacks]
        )

    def _spread(self, views: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """Bring the stacks' views into the order of layers."""
        if len(views) == 1:
            return views[0]
        by_layer = {
            layer_index: view
            for stack_views, (_, indices) in zip(views, self._stacks, strict=True)
            for layer_index, view in zip(indices, stack_views, strict=True)
        }
        return [by_layer[layer_index] for layer_index in range(self._num_layers)]


@dataclass(eq=False)
class KVSlab:
    """See the module docstring.

    Attributes:
        keys: per layer [1, kv_heads, capacity_tokens, head_dim], after RoPE.
        values: per layer [1, kv_heads, capacity_tokens, value_dim].
        free_keys: per layer [capacity_tokens, kv_heads, head_dim], before RoPE; not written for
            layers without rotary embedding, whose `keys` carry no position; None: this sequence is
            not going to be stored.
        capacity_tokens: rows there are.
        num_tokens: rows in use.
        save_from: first row whose position-free key is here: the `from_token` of a store.
    """

    keys: LayerRows
    values: LayerRows
    free_keys: LayerRows | None
    capacity_tokens: int
    num_tokens: int = 0
    save_from: int = 0

    @property
    def free_tokens(self) -> int:
        """Rows that can still be appended."""
        return self.capacity_tokens - self.num_tokens

    def reset(self) -> None:
        """Forget every row, as after a load that cannot be trusted."""
        self.num_tokens = 0
        self.save_from = 0


def allocate_slab(
    shapes: Sequence[LayerShape],
    capacity_tokens: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    save: bool,
) -> KVSlab:
    """Allocate an empty slab; rows that are never written cost address space only."""

    def rows(per_token: Sequence[tuple[int, int]], *, head_major: bool) -> LayerRows:
        stacks = []
        for shape in dict.fromkeys(per_token):
            indices = [index for index, other in enumerate(per_token) if other == shape]
            heads, dim = shape
            sizes = (
                (1, heads, capacity_tokens, dim) if head_major else (capacity_tokens, heads, dim)
            )
            stacks.append((_allocate((len(indices), *sizes), device, dtype), indices))
        return LayerRows(stacks, token_dim=2 if head_major else 0)

    keys = [shape.key for shape in shapes]
    return KVSlab(
        keys=rows(keys, head_major=True),
        values=rows([shape.value for shape in shapes], head_major=True),
        free_keys=rows(keys, head_major=False) if save else None,
        capacity_tokens=capacity_tokens,
    )


def _allocate(sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor; in main memory in huge pages where the system lends them.

    A slab is written for the first time and then read once per token, too much for any cache: huge
    pages save most page faults of the one and most address lookups of the other.
    """
    num_bytes = prod(sizes) * dtype.itemsize
    if device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return torch.empty(sizes, device=device, dtype=dtype)
    memory = mmap.mmap(
        -1, align_up(num_bytes, HUGE_PAGE_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=prod(sizes)).view(tuple(sizes))
