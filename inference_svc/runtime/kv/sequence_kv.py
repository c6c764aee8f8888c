"""SequenceKv and WriteBuffer: the KV of one running sequence, and its tokens that wait for a save.

Attention reads a sequence's KV. It is contiguous per layer and head, since decode reads one head's
tokens after another, which memory serves twice as fast as tokens of all heads interleaved. A save
reads a write buffer: keys before RoPE, token-major like a block, so that a save only copies, and
the sequence's KV can be reused before the save is done.

Owns tensors, counters and the hold on their memory (`kv_pool.py` lends it); knows nothing of
blocks, sessions or models.

Invariants:
1. token slots [0, num_tokens) of a sequence's KV hold keys after RoPE at position = slot, and
   values; with a gate, a layer's slots do so only once the gate lets that layer pass;
2. the slots of tokens [first_token, end_token) of a write buffer hold the same tokens' keys before
   RoPE, and values; index keys, of models that have them, are treated like keys in both;
3. slots beyond are garbage: a failed step or load leaves both as they were, and states too;
4. `MemoryHold` calls `free` exactly once: when the last of its owner and holders leaves;
5. memory that was released cannot be taken hold of, even while earlier holders still have it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from inference_svc.core.kv_room import MOST_UNSAVED_STATES
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.kv.layer_tensors import Places, SlotTensors, TokenTensors
from inference_svc.runtime.kv.states import SequenceStates


def _leave_to_garbage_collection() -> None:
    """Do nothing: memory outside of the pool is freed with the last tensor that views it."""


class MemoryHold:
    """The hold on lent memory: it is reused only when its owner and all copies are done with it.

    As a context manager it keeps the memory inside the block, which may be left in another thread;
    blocks may overlap. Every method may be called from any thread.
    """

    def __init__(self, free: Callable[[], None] = _leave_to_garbage_collection) -> None:
        """Store the function that frees the memory."""
        self._free = free
        self._lock = threading.Lock()
        self._num_holders = 0
        self._is_released = False

    def __enter__(self) -> None:
        """Keep the memory.

        Raises:
            AssertionError: the memory was released before.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("released memory is taken hold of")
            self._num_holders += 1

    def __exit__(self, *_error: object) -> None:
        """Keep it no longer."""
        with self._lock:
            self._num_holders -= 1
            is_last = self._is_released and self._num_holders == 0
        if is_last:
            self._free()

    def release(self) -> None:
        """Release the memory for its owner: it is freed now, or by the last holder.

        Raises:
            AssertionError: it was released before.
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
    """Working KV of either kind: tensors of every layer, in memory that a pool lends.

    Attributes:
        keys: keys of all layers; see the classes below for their shapes.
        values: values of all layers.
        indexes: index keys of all layers; None: the model has none (`LayerShape.index`).
        memory: the hold on their memory, which the pool that lent it releases.
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
        """Keep the memory from being reused inside the block, even if it is released meanwhile."""
        return self.memory


@dataclass(eq=False)
class SequenceKv(LentKv[TokenTensors]):
    """The KV that attention reads: keys after RoPE and values of one sequence, by position.

    Tokens lie side by side (`ContiguousTokens`) or on pages (`paged_kv.PagedTokens`); layers with a
    window may hold the last ones only (`windowed_kv.WindowedTokens`).

    Attributes:
        capacity_tokens: number of token slots.
        num_tokens: number of token slots in use.
        gate: the gate that a forward waits for before it reads a layer; None: all layers are there.
        states: the sequence's recurrent states; None: the model has none. With a gate, they cover
            all `num_tokens` tokens only once the gate lets layer 0 pass.
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
        """Position of the first token that layers with a window hold; 0: they hold all tokens."""
        return 0

    def begin_at(self, _window_from: int) -> None:
        """Let layers with a window begin at a token; does nothing, see `WindowedKv`."""

    def keep_from(self, _window_from: int) -> None:
        """Drop tokens of layers with a window before a position; does nothing, see `WindowedKv`."""

    def reset(self) -> None:
        """Forget all tokens and the gate, as after a load that failed."""
        self.num_tokens = 0
        self.gate = None
        if self.states is not None:
            self.states.clear()


def _keep_slots(_slots: Sequence[int]) -> None:
    """Do nothing: a buffer with memory of its own releases it as a whole."""


@dataclass(eq=False)
class WriteBuffer(LentKv[SlotTensors]):
    """The KV that a save reads: keys before RoPE and values of tokens that wait to be stored.

    `keys` are per layer [slots, kv_heads, head_dim], also in layers without rotary embedding;
    `values` are [slots, kv_heads, value_dim]. Either all slots are the buffer's own, or the tensors
    are those of the write ring (`write_ring.py`), and the buffer has some slots in any order.

    Attributes:
        first_token: position of its first token; the next block to be stored begins there.
        slots: slots by position, counted from the initial `first_token`. It still lists the slots
            of forgotten tokens, which belong to other buffers now.
        end_token: position after the last token.
        give: callback that takes back the slots of forgotten tokens.
        states: by position, the recurrent states that wait to be stored; see `note_state`.
        load_ends: positions, in order, at which a load shall be able to end: layers with a window
            have to store the tokens before each.
    """

    first_token: int
    slots: list[int]
    end_token: int = -1  # becomes first_token
    give: Callable[[Sequence[int]], None] = field(default=_keep_slots, repr=False)
    states: dict[int, SequenceStates] = field(default_factory=dict, repr=False)
    load_ends: tuple[int, ...] = ()
    _base_token: int = field(init=False)

    def __post_init__(self) -> None:
        self._base_token = self.first_token
        if self.end_token < 0:
            self.end_token = self.first_token

    @property
    def room_end(self) -> int:
        """Position after the last token that the buffer has a slot for."""
        return self._base_token + len(self.slots)

    @property
    def free_tokens(self) -> int:
        """Number of tokens that can still be appended."""
        return self.room_end - self.end_token

    def slots_of(self, first_token: int, num_tokens: int) -> Sequence[int]:
        """Return the slots of tokens by position in the sequence.

        Raises:
            AssertionError: the buffer has no slots for them.
        """
        start = first_token - self._base_token
        if first_token < self.first_token or first_token + num_tokens > self.room_end:
            raise AssertionError(
                f"tokens {first_token}+{num_tokens} of a buffer with slots for those from "
                f"{self.first_token} to {self.room_end}"
            )
        return self.slots[start : start + num_tokens]

    def places(self, first_token: int, num_tokens: int) -> Places:
        """Return the places of tokens in each layer's tensors; raises like `slots_of`."""
        return Places(self.slots_of(first_token, num_tokens), self.device)

    def forget_before(self, first_token: int) -> None:
        """Give back the slots of the tokens before a position; they are stored."""
        if first_token > self.end_token:
            raise AssertionError(f"tokens to {first_token} forgotten of {self.end_token} computed")
        slots = self.slots_of(self.first_token, first_token - self.first_token)
        self.first_token = first_token
        self.give(slots)

    def note_state(self, kv: SequenceKv) -> None:
        """Keep a sequence's current state, if it has one, until it is stored.

        If too many states wait, the second oldest is dropped: the first and the newest stay.
        """
        if kv.states is None:
            return
        if len(self.states) == MOST_UNSAVED_STATES and kv.num_tokens not in self.states:
            del self.states[sorted(self.states)[1]]
        self.states[kv.num_tokens] = kv.states.fork()

    def load_ends_within(self, num_tokens: int) -> list[int]:
        """Return the positions at which loads shall be able to end, if `num_tokens` are stored.

        Behind the last of `load_ends`, which is in the answer, `num_tokens` is one more: the answer
        may end there.
        """
        is_behind = not self.load_ends or num_tokens > self.load_ends[-1]
        return [*self.load_ends, num_tokens] if is_behind else list(self.load_ends)

    def forget_states(self, positions: Iterable[int]) -> None:
        """Drop states that are stored, or will not be; positions without a state are ignored."""
        for position in positions:
            self.states.pop(position, None)

    def remaining_slots(self) -> Sequence[int]:
        """Return the slots that the buffer still has, unused ones included."""
        return self.slots_of(self.first_token, self.room_end - self.first_token)
