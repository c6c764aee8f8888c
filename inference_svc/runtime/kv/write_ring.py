"""WriteRing: where what is computed waits until kvd has it, in memory of bounded size for all.

    ring          num_slots slots     keys [layers of a shape, slots, kv_heads, head_dim] ...,
                  and a spare one     values [..., value_dim] ...
    write buffer  those of its turn   in any order: they are taken as tokens are computed, and given
                                      back as blocks are stored, the oldest first

Owns the memory; which slots are free is counted by the scheduler's `WriteSlots`, which has room for
a chunk before it plans one. The spare slot is nobody's: what is written to it is never stored.

Invariant: a slot is lent again only after the copy that reads it is over: tokens are forgotten once
they are stored, and a buffer's last slots go when its owner and every holder have let go.
"""

import threading
from collections.abc import Sequence

import torch

from inference_svc.core.scheduling.write_slots import WriteSlots
from inference_svc.runtime.kv.layer_tensors import LayerShape, SlotTensors, divided, token_items_of
from inference_svc.runtime.kv.sequence_kv import MemoryHold, WriteBuffer
from inference_svc.runtime.memory import allocate_region


class WriteRing:
    """See the module docstring; slots are taken on the event loop and given from any thread.

    Args:
        slots: the account of them.
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
        self._keys, self._values, self._indexes = divided(region, shapes, num_all, SlotTensors)

    @property
    def num_slots(self) -> int:
        """Number of slots that may be lent; the spare one is behind them."""
        return self._slots.num_slots

    def spare_buffer(self) -> WriteBuffer:
        """Return a buffer on the spare slot, which any number of tokens may be written to."""
        return WriteBuffer(self._keys, self._values, 0, [self.num_slots], indexes=self._indexes)

    def lend(self, first_token: int, end_token: int) -> WriteBuffer:
        """Lend a write buffer with room for tokens [first_token, end_token), which are its own.

        They are the first tokens of a block that is going to grow. Where they are more than half of
        what is free, the buffer begins at `end_token`: the block stays as short as it is stored.
        Whoever loads cannot store yet, and must not take all the room of those who could.
        """
        if 2 * (end_token - first_token) > self._slots.num_free:
            first_token = end_token
        buffer = WriteBuffer(
            self._keys,
            self._values,
            first_token,
            [],
            end_token,
            self._give,
            indexes=self._indexes,
            memory=MemoryHold(lambda: self._give(buffer.remaining_slots())),
        )
        self.extend(buffer, end_token)
        return buffer

    def extend(self, buffer: WriteBuffer, end_token: int) -> None:
        """Take slots for tokens up to a position; what has slots already keeps them."""
        with self._lock:
            buffer.slots += self._slots.take(max(0, end_token - buffer.room_end))

    def _give(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._slots.release(slots)
