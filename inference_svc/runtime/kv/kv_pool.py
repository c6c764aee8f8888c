"""KVPool: lends memory, in token slots, for sequences' KV and for write buffers.

There is one region, allocated and faulted in once, since fresh pages cost a load more than its
copies do. Where the region has no contiguous room, a piece gets memory of its own: that is slower,
but never fails. The scheduler limits the number of token slots altogether.

    region       = slot | slot | ...  a slot: K and V of one token, all layers, padded to 64 bytes
    sequence KV  = capacity slots     keys [layers of a shape, 1, kv_heads, capacity, head_dim] ...,
                   or fewer           values [..., value_dim] ...; fewer slots where layers with a
                                      window hold the last tokens only (`windowed_kv.py`)
    write buffer = capacity slots     keys [layers of a shape, capacity, kv_heads, head_dim] ...,
                                      values [..., value_dim] ...

Owns the region and the account of lent slots; knows nothing of a sequence's tokens.

Invariants:
1. no two lent pieces overlap;
2. a piece is lent again only after its owner has released it and every holder has left.
"""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from inference_svc.core.scheduling.slot_space import SlotSpace
from inference_svc.runtime.kv.layer_groups import HeldWindows
from inference_svc.runtime.kv.layer_tensors import (
    ContiguousTokens,
    LayerShape,
    SlotTensors,
    divide_memory,
    token_items_of,
)
from inference_svc.runtime.kv.sequence_kv import MemoryHold, SequenceKv, WriteBuffer
from inference_svc.runtime.kv.states import SequenceStates, StateShape
from inference_svc.runtime.kv.windowed_kv import WindowedKv, WindowedTokens
from inference_svc.runtime.memory import allocate_region, populate
from shared.types.units import align_up

SLOT_ALIGNMENT = 64  # bytes; a cache line


class KVPool:
    """The pool of working KV; every method may be called from any thread.

    Attributes:
        num_token_slots: size of the region, in token slots.
        token_slot_bytes: bytes of one token's components in all layers, padded.
        num_outside: number of pieces so far for which the region had no room.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        num_token_slots: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        states: Sequence[StateShape] = (),
        windows: HeldWindows | None = None,
    ) -> None:
        """Reserve address space; memory comes with `prefault` or first use.

        Args:
            shapes: the shapes of all layers.
            num_token_slots: token slots of sequences' KV and write buffers together.
            device: where the tensors are.
            dtype: the tensors' element type.
            states: shapes of the sequences' recurrent states, which have memory of their own;
                empty for a model without states.
            windows: what sequences hold in layers with a window; None: all tokens.
        """
        self._windows = windows
        self._states = states
        self.num_token_slots = num_token_slots
        self._shapes = shapes
        self._device = device
        self._dtype = dtype
        token_items = token_items_of(shapes)
        self.token_slot_bytes = align_up(token_items * dtype.itemsize, SLOT_ALIGNMENT)
        self._slot_items = self.token_slot_bytes // dtype.itemsize
        self._region = allocate_region(num_token_slots * self._slot_items, device, dtype)
        self._lock = threading.Lock()
        self._space = SlotSpace(num_token_slots)
        self.num_outside = 0
        self._is_closed = False

    @property
    def num_free(self) -> int:
        """Number of the region's token slots that are not lent."""
        with self._lock:
            return self._space.num_free

    def new_kv(self, capacity_tokens: int, pages: Sequence[int] = ()) -> SequenceKv:
        """Lend empty KV with contiguous tokens; the caller owes `release`.

        Args:
            capacity_tokens: number of tokens to make room for.
            pages: empty: this pool has no pages.
        """
        assert not pages, "this pool has no pages"  # noqa: S101
        if self._windows is not None and capacity_tokens > self._windows.rows.num_rows:
            return self._new_windowed_kv(capacity_tokens, self._windows)
        flat, memory = self._lend(capacity_tokens, from_top=False)
        keys, values, indexes = divide_memory(flat, self._shapes, capacity_tokens, ContiguousTokens)
        return SequenceKv(
            keys,
            values,
            capacity_tokens,
            indexes=indexes,
            memory=memory,
            states=self._new_states(),
        )

    def _new_windowed_kv(self, capacity_tokens: int, windows: HeldWindows) -> WindowedKv:
        """Lend windowed KV; its capacity may be a token larger than the one given."""
        num_slots = windows.rows.slots_for(capacity_tokens)
        capacity_tokens = windows.rows.tokens_in(num_slots)
        flat, memory = self._lend(num_slots, from_top=False)
        num_rows = windows.rows_by_layer(len(self._shapes), capacity_tokens)
        keys, values, _ = divide_memory(flat, self._shapes, num_rows, WindowedTokens)
        return WindowedKv(keys, values, capacity_tokens, memory=memory)

    def new_write_buffer(self, first_token: int, capacity_tokens: int) -> WriteBuffer:
        """Lend an empty write buffer for tokens from `first_token` on, to be released later."""
        flat, memory = self._lend(capacity_tokens, from_top=True)
        keys, values, indexes = divide_memory(flat, self._shapes, capacity_tokens, SlotTensors)
        slots = list(range(capacity_tokens))
        return WriteBuffer(keys, values, first_token, slots, indexes=indexes, memory=memory)

    def release(self, lent: SequenceKv | WriteBuffer) -> None:
        """Take memory back, now or when the last copy or step that holds it is done.

        Raises:
            AssertionError: it was released before.
        """
        lent.memory.release()

    def prefault(self) -> int:
        """Fault in the whole region; block until done or `close`; return the bytes faulted in."""
        return populate(self._region, lambda: self._is_closed)

    def close(self) -> None:
        """End a `prefault` under way; lent memory stays valid."""
        self._is_closed = True

    def check(self) -> None:
        """Raise AssertionError if the account of lent slots is inconsistent."""
        with self._lock:
            self._space.check()

    def _new_states(self) -> SequenceStates | None:
        """Return the states of an empty sequence; None: the model has no states."""
        return SequenceStates(self._states, self._device) if self._states else None

    def _lend(self, num_tokens: int, *, from_top: bool) -> tuple[Tensor, MemoryHold]:
        """Return flat memory of `num_tokens` token slots, and the hold that releases it."""
        if num_tokens < 1:
            raise AssertionError(f"{num_tokens} token slots were asked for")
        num_items = num_tokens * self._slot_items
        with self._lock:
            first_slot = self._space.allocate(num_tokens, from_top=from_top)
            if first_slot is None:
                self.num_outside += 1
        if first_slot is None:
            return allocate_region(num_items, self._device, self._dtype), MemoryHold()

        def free(first_slot: int = first_slot) -> None:
            with self._lock:
                self._space.free(first_slot)

        return self._region.narrow(0, first_slot * self._slot_items, num_items), MemoryHold(free)
