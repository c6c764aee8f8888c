"""WriteRing: memory of bounded size in which new tokens of all turns wait until kvd stores them.

    ring          num_slots slots     keys [layers of a shape, slots, kv_heads, head_dim] ...,
                  and a spare one     values [..., value_dim] ...
    write buffer  slots of one turn   in any order: taken as tokens are computed, and given back as
                                      blocks are stored, the oldest first

Owns the memory. The scheduler's `WriteSlots` is the account of free slots: it makes room for a
chunk before it plans one. The spare slot belongs to no turn: tokens written to it are never stored.

Invariant: a slot is lent again only after the copy that reads it is over. Tokens are forgotten once
they are stored, and a buffer's last slots are freed when its owner and every holder have left.
"""

import threading
from collections.abc import Sequence

import torch

from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.kv.layer_tensors import (
    LayerShape,
    SlotTensors,
    divide_memory,
    token_items_of,
)
from inference_svc.runtime.kv.sequence_kv import MemoryHold, WriteBuffer
from inference_svc.runtime.memory import allocate_region


class WriteRing:
    """The memory of all write buffers.

    Slots are taken on the event loop, and may be given back from any thread.

    Args:
        shapes: the shapes of all layers.
        slots: the scheduler's account of slots.
        device: where the tensors are.
        dtype: the tensors' element type.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: WriteSlots,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        num_all = slots.num_slots + 1
        region = allocate_region(num_all * token_items_of(shapes), device, dtype)
        self._keys, self._values, self._indexes = divide_memory(
            region, shapes, num_all, SlotTensors
        )

    @property
    def num_slots(self) -> int:
        """Number of slots that may be lent; the spare one is behind them."""
        return self._slots.num_slots

    def spare_buffer(self) -> WriteBuffer:
        """Return a buffer on the spare slot, to which unneeded tokens are written."""
        return WriteBuffer(self._keys, self._values, 0, [self.num_slots], indexes=self._indexes)

    def lend(self, first_token: int, end_token: int) -> WriteBuffer:
        """Lend a write buffer that holds tokens [first_token, end_token).

        They are the first tokens of a block that will grow. If they need more than half of the free
        slots, the buffer begins at `end_token` instead, and the block stays as short as it is
        stored: a turn that is still loading cannot store yet, and must not take all the slots of
        turns that can.
        """
        if 2 * (end_token - first_token) > self._slots.num_free:
            first_token = end_token
        buffer = WriteBuffer(
            self._keys,
            self._values,
            first_token,
            [],
            end_token,
            self._give_back,
            indexes=self._indexes,
            memory=MemoryHold(lambda: self._give_back(buffer.remaining_slots())),
        )
        self.extend(buffer, end_token)
        return buffer

    def extend(self, buffer: WriteBuffer, end_token: int) -> None:
        """Take slots for the buffer's tokens up to a position; tokens with slots keep them."""
        with self._lock:
            buffer.slots += self._slots.take(max(0, end_token - buffer.room_end))

    def _give_back(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._slots.release(slots)
