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
4. `MemoryHold` calls `free` exactly once, by whoever releases last: the owner or a holder;
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

    def __init__(self, free: Callable[[], None] = _leave_to_garbage_collection) -> None:
        """Store what to call once nobody needs the memory."""
        self._free = free
        self._lock = threading.Lock()
        self._num_holders = 0
        self._is_released = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the memory inside the block; it may be left in another thread.

        Raises:
            AssertionError: if it was released before.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("released memory is taken hold of")
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                is_last = self._is_released and self._num_holders == 0
            if is_last:
                self._free()

    def release(self) -> None:
        """Release the owner's part: the memory is freed now, or by the last holder.

        Raises:
            AssertionError: the second time.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("memory is released twice")
            self._is_released = True
            is_last = self._num_holders == 0
        if is_last:
            self._free()


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
            token_dim: the dimension of one layer's tensor that counts token slots.
        """
        self._stacks = stacks
        self._token_dim = token_dim
        self._num_layers = sum(len(indices) for _, indices in stacks)
        self.layers = self._spread([stack.unbind(0) for stack, _ in stacks])

    def __getitem__(self, layer_index: int) -> Tensor:
        return self.layers[layer_index]

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """View token slots [first, first + num_tokens) of every layer.

        Half the cost of cutting them one by one.
        """
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
class LentKv:
    """Working KV of either kind: tensors of every layer in memory that a pool lends.

    Attributes:
        keys: per layer, see the classes below; in the pool's dtype, on its device.
        values: per layer, likewise.
        capacity_tokens: number of token slots.
        memory: the hold on the memory beneath, which the pool that lent it releases.
    """

    keys: LayerTensors
    values: LayerTensors
    capacity_tokens: int
    memory: MemoryHold = field(default_factory=MemoryHold, repr=False, kw_only=True)

    @property
    def device(self) -> torch.device:
        """The device that the tensors are on."""
        return self.keys[0].device

    def hold(self) -> AbstractContextManager[None]:
        """Keep the memory from being reused inside the block, released or not."""
        return self.memory.hold()


@dataclass(eq=False)
class SequenceKv(LentKv):
    """What attention reads: keys and values of one sequence's tokens, by position.

    `keys` are per layer [1, kv_heads, capacity_tokens, head_dim], after RoPE; `values` are
    [1, kv_heads, capacity_tokens, value_dim].

    Attributes:
        num_tokens: number of token slots in use.
        gate: what a forward has to wait for before it reads a layer; None: all layers are there.
    """

    num_tokens: int = 0
    gate: LayerGate | None = None

    @property
    def free_tokens(self) -> int:
        """Number of tokens that can still be appended."""
        return self.capacity_tokens - self.num_tokens

    def reset(self) -> None:
        """Forget every token and the gate, as after a load that cannot be trusted."""
        self.num_tokens = 0
        self.gate = None


@dataclass(eq=False)
class WriteBuffer(LentKv):
    """What a save reads: keys before RoPE and values of the tokens that are to be stored.

    `keys` are per layer [capacity_tokens, kv_heads, head_dim], of layers without rotary embedding
    too; `values` are [capacity_tokens, kv_heads, value_dim].

    Attributes:
        first_token: position in the sequence of slot 0.
        end_token: position after the last slot in use.
    """

    first_token: int
    end_token: int = -1  # becomes first_token

    def __post_init__(self) -> None:
        if self.end_token < 0:
            self.end_token = self.first_token

    @property
    def free_tokens(self) -> int:
        """Number of tokens that can still be appended."""
        return self.first_token + self.capacity_tokens - self.end_token

    def cut(self, first_token: int, num_tokens: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """View tokens by position in the sequence.

        Returns:
            keys [num_tokens, kv_heads, head_dim] and values [num_tokens, kv_heads, value_dim] of
            every layer.

        Raises:
            AssertionError: if the buffer has no slots for them.
        """
        slot = first_token - self.first_token
        if not 0 <= slot <= self.capacity_tokens - num_tokens:
            raise AssertionError(
                f"tokens {first_token}+{num_tokens} cut from a buffer of {self.capacity_tokens} "
                f"tokens from {self.first_token} on"
            )
        return self.keys.cut(slot, num_tokens), self.values.cut(slot, num_tokens)
