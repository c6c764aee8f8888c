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
2. the slots of tokens [first_token, end_token) of a write buffer are the same tokens' keys before
   RoPE, and values; index keys, of models that have them, are keys in both;
3. slots beyond are garbage: a failed step or load leaves both as they were, and states too;
4. `MemoryHold` calls `free` exactly once, by whoever releases last: the owner or a holder;
5. nobody takes hold of memory that was released, even while others still hold it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from inference_svc.core.kv_room import MOST_UNSAVED_STATES
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.layer_tensors import Places, SlotTensors, TokenTensors
from inference_svc.runtime.kv.states import SequenceStates


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


K = TypeVar("K", TokenTensors, SlotTensors)


@dataclass(eq=False)
class LentKv(Generic[K]):
    """Working KV of either kind: tensors of every layer in memory that a pool lends.

    Attributes:
        keys: see the classes below; in the pool's dtype, on its device.
        values: likewise.
        indexes: index keys likewise, of models that have some (`LayerShape.index`).
        memory: the hold on the memory beneath, which the pool that lent it releases.
    """

    keys: K
    values: K
    indexes: K | None = field(default=None, kw_only=True)
    memory: MemoryHold = field(default_factory=MemoryHold, repr=False, kw_only=True)

    @property
    def device(self) -> torch.device:
        """The device that the tensors are on."""
        return self.keys.device

    @property
    def components(self) -> tuple[K, ...]:
        """Keys, values and, if there are any, index keys: the order of a layout's components."""
        if self.indexes is None:
            return self.keys, self.values
        return self.keys, self.values, self.indexes

    def hold(self) -> AbstractContextManager[None]:
        """Keep the memory from being reused inside the block, released or not."""
        return self.memory.hold()


@dataclass(eq=False)
class SequenceKv(LentKv[TokenTensors]):
    """What attention reads: keys after RoPE and values of one sequence's tokens, by position.

    They lie side by side (`ContiguousTokens`), or on pages (`paged_kv.PagedTokens`); layers with a
    window may hold the last ones only (`windowed_kv.WindowedTokens`).

    Attributes:
        capacity_tokens: number of token slots.
        num_tokens: number of token slots in use.
        gate: what a forward has to wait for before it reads a layer; None: all layers are there.
        states: what a recurrent model remembers; None: the model has no such layer. With a gate,
            that of all `num_tokens` tokens only once the gate lets layer 0 pass.
    """

    capacity_tokens: int
    num_tokens: int = 0
    gate: LayerGate | None = None
    states: SequenceStates | None = field(default=None, kw_only=True)

    @property
    def free_tokens(self) -> int:
        """Number of tokens that can still be appended."""
        return self.capacity_tokens - self.num_tokens

    @property
    def window_from(self) -> int:
        """First token that layers with a window have room for: all have room for all tokens."""
        return 0

    def begin_at(self, _window_from: int) -> None:
        """Have layers with a window begin at a token: nothing changes, see `WindowedKv`."""

    def keep_from(self, _window_from: int) -> None:
        """Give back what layers with a window hold before a token: nothing, see `WindowedKv`."""

    def reset(self) -> None:
        """Forget every token and the gate, as after a load that cannot be trusted."""
        self.num_tokens = 0
        self.gate = None
        if self.states is not None:
            self.states.clear()


def _keep(_slots: Sequence[int]) -> None:
    """Memory of its own is given back as a whole."""


@dataclass(eq=False)
class WriteBuffer(LentKv[SlotTensors]):
    """What a save reads: keys before RoPE and values of the tokens that are to be stored.

    `keys` are per layer [slots, kv_heads, head_dim], of layers without rotary embedding too;
    `values` are [slots, kv_heads, value_dim]. Either all slots are the buffer's own, or they are
    those of the write ring (`write_ring.py`), of which the buffer has some here and there.

    Attributes:
        first_token: position of its first token; the next block to be stored begins there.
        slots: by position, from what `first_token` was at first: those of tokens that were
            forgotten included, which are others' now.
        end_token: position after the last token.
        give: takes back slots of tokens that are forgotten.
        states: by position, states that are to be stored; see `note_state`.
        load_ends: positions at which loads are to be able to end, in order: of layers with a window
            the tokens before these are to be stored.
    """

    first_token: int
    slots: list[int]
    end_token: int = -1  # becomes first_token
    give: Callable[[Sequence[int]], None] = field(default=_keep, repr=False)
    states: dict[int, SequenceStates] = field(default_factory=dict, repr=False)
    load_ends: tuple[int, ...] = ()
    _base_token: int = field(init=False)

    def __post_init__(self) -> None:
        self._base_token = self.first_token
        if self.end_token < 0:
            self.end_token = self.first_token

    @property
    def room_end(self) -> int:
        """Position after the last token that there is a slot for."""
        return self._base_token + len(self.slots)

    @property
    def free_tokens(self) -> int:
        """Number of tokens that can still be appended."""
        return self.room_end - self.end_token

    def slots_of(self, first_token: int, num_tokens: int) -> Sequence[int]:
        """Return the slots of tokens by position in the sequence.

        Raises:
            AssertionError: if the buffer has no slots for them.
        """
        start = first_token - self._base_token
        if first_token < self.first_token or first_token + num_tokens > self.room_end:
            raise AssertionError(
                f"tokens {first_token}+{num_tokens} of a buffer with slots for those from "
                f"{self.first_token} to {self.room_end}"
            )
        return self.slots[start : start + num_tokens]

    def places(self, first_token: int, num_tokens: int) -> Places:
        """Return where tokens are in each layer's tensors; raises as `slots_of` does."""
        return Places(self.slots_of(first_token, num_tokens), self.device)

    def forget_before(self, first_token: int) -> None:
        """Give back the slots of tokens before a position, which are stored."""
        if first_token > self.end_token:
            raise AssertionError(f"tokens to {first_token} forgotten of {self.end_token} computed")
        slots = self.slots_of(self.first_token, first_token - self.first_token)
        self.first_token = first_token
        self.give(slots)

    def note_state(self, kv: SequenceKv) -> None:
        """Keep the state behind a sequence's tokens, if it has one, until it is stored.

        Of many that wait, those between the first and the newest are given up.
        """
        if kv.states is None:
            return
        if len(self.states) == MOST_UNSAVED_STATES and kv.num_tokens not in self.states:
            del self.states[sorted(self.states)[1]]
        self.states[kv.num_tokens] = kv.states.fork()

    def wanted_ends(self, num_tokens: int) -> list[int]:
        """Return where loads are to be able to end, in order, if the first tokens are stored.

        Behind the last of them that is wherever the tokens end: there the answer may, too.
        """
        is_behind = not self.load_ends or num_tokens > self.load_ends[-1]
        return [*self.load_ends, num_tokens] if is_behind else list(self.load_ends)

    def forget_states(self, positions: Iterable[int]) -> None:
        """Forget the states at positions, which are stored, or will not be; some may have gone."""
        for position in positions:
            self.states.pop(position, None)

    def remaining_slots(self) -> Sequence[int]:
        """Return the slots of all that was not forgotten."""
        return self.slots_of(self.first_token, self.room_end - self.first_token)
