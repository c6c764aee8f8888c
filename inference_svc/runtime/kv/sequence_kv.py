"""SequenceKv and WriteBuffer: the KV of one running sequence, and what is to be stored of it.

A sequence's KV is what attention reads: contiguous per layer and head, since decode reads one
head's tokens after another, twice as fast from memory as tokens of all heads interleaved. A write
buffer is what a save reads: keys before RoPE, token-major like a block, so that storing is plain
copying, and the sequence's KV is free for reuse before that is done.

Owns tensors, counters and the hold on the memory beneath (`kv_pool.py` lends it); knows nothing of
blocks, sessions or models.

Invariants:
1. token slots [0, num_tokens) of a sequence's KV are keys after RoPE at position = slot, and
   values; with a gate, those of a layer only once the gate lets it pass;
2. token slots [0, end_token - first_token) of a write buffer are the same tokens' keys before RoPE,
   and values;
3. slots beyond are garbage: a failed step or load leaves both as they were;
4. `MemoryHold` calls `give_back` exactly once, by whoever lets go last: the owner or a holder;
5. nobody takes hold of memory that was released, even while others still hold it.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_gate import LayerGate


def _leave_to_garbage_collection() -> None:
    """Memory of its own goes with the last tensor that views it."""


class MemoryHold:
    """Whether lent memory may be reused: not while its owner or a copy still needs it.

    Every method may be called from any thread.
    """

    def __init__(self, give_back: Callable[[], None] = _leave_to_garbage_collection) -> None:
        """Store what to call once nobody needs the rows."""
        self._give_back = give_back
        self._lock = threading.Lock()
        self._num_holders = 0
        self._is_released = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the rows inside the block; it may be left in another thread.

        Raises:
            AssertionError: if they were released before.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("released rows are taken hold of")
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                is_last = self._is_released and self._num_holders == 0
            if is_last:
                self._give_back()

    def release(self) -> None:
        """Let the owner's part go: the rows are given back now or by the last holder.

        Raises:
            AssertionError: the second time.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("rows are released twice")
            self._is_released = True
            is_last = self._num_holders == 0
        if is_last:
            self._give_back()


class LayerShape(NamedTuple):
    """Per-token shapes of one layer: (kv_heads, head_dim) and (kv_heads, value_dim)."""

    key: tuple[int, int]
    value: tuple[int, int]


class LayerTensors:
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
class SequenceKv:
    """See the module docstring.

    Attributes:
        keys: per layer [1, kv_heads, capacity_tokens, head_dim], after RoPE.
        values: per layer [1, kv_heads, capacity_tokens, value_dim].
        capacity_tokens: rows there are.
        num_tokens: rows in use.
        gate: what a forward has to wait for before it reads a layer's rows; None: for nothing.
        memory: the rows' hold, which the pool that lent them releases.
    """

    keys: LayerTensors
    values: LayerTensors
    capacity_tokens: int
    num_tokens: int = 0
    gate: LayerGate | None = None
    memory: MemoryHold = field(default_factory=MemoryHold, repr=False)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.keys[0].device

    @property
    def free_tokens(self) -> int:
        """Rows that can still be appended."""
        return self.capacity_tokens - self.num_tokens

    def hold(self) -> AbstractContextManager[None]:
        """Keep the rows from being reused inside the block, released or not."""
        return self.memory.hold()

    def reset(self) -> None:
        """Forget every row and the gate, as after a load that cannot be trusted."""
        self.num_tokens = 0
        self.gate = None


@dataclass(eq=False)
class WriteBuffer:
    """See the module docstring.

    Attributes:
        keys: per layer [capacity_tokens, kv_heads, head_dim], before RoPE; of layers without
            rotary embedding too.
        values: per layer [capacity_tokens, kv_heads, value_dim].
        first_token: position in the sequence of row 0.
        capacity_tokens: rows there are.
        end_token: position after the last row in use.
        memory: as a sequence's KV's.
    """

    keys: LayerTensors
    values: LayerTensors
    first_token: int
    capacity_tokens: int
    end_token: int = -1  # becomes first_token
    memory: MemoryHold = field(default_factory=MemoryHold, repr=False)

    def __post_init__(self) -> None:
        if self.end_token < 0:
            self.end_token = self.first_token

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.keys[0].device

    @property
    def free_tokens(self) -> int:
        """Rows that can still be appended."""
        return self.first_token + self.capacity_tokens - self.end_token

    def cut(self, first_token: int, num_tokens: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """View keys and values of these tokens, by position in the sequence, of every layer.

        Raises:
            AssertionError: if the buffer has no rows for them.
        """
        row = first_token - self.first_token
        if not 0 <= row <= self.capacity_tokens - num_tokens:
            raise AssertionError(
                f"tokens {first_token}+{num_tokens} cut from a buffer of {self.capacity_tokens} "
                f"rows from {self.first_token} on"
            )
        return self.keys.cut(row, num_tokens), self.values.cut(row, num_tokens)

    def hold(self) -> AbstractContextManager[None]:
        """Keep the rows from being reused inside the block, released or not."""
        return self.memory.hold()
