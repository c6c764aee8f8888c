"""RegisteredMemory: the slots of an arena, page-locked for a GPU chunk by chunk.

Locking takes a second for each 5 to 20 GB, and an arena may have hundreds of GB. So a background
thread does it, from the first slots on, and slots that are not locked yet are copied by other
means. Where locking fails (limits of the system, a driver that refuses) it stops, and the other
slots stay as they are.
"""

import ctypes
import math
import mmap
import threading
from collections.abc import Callable
from typing import Protocol

from shared.cuda.driver_calls import DriverError
from shared.process.log import get_logger

CHUNK_BYTES = 1 << 30

log = get_logger(__name__)


class HostRegister(Protocol):
    """A driver that page-locks host memory. Thread-safe."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock host memory in place, so that the device reads and writes it directly.

        Raises:
            DriverError: it cannot be locked.
        """

    def unregister(self, address: int) -> None:
        """Undo the `register` at this address; blocks until copies from or to it are done."""


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory, valid for as long as the view is referred to."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class RegisteredMemory:
    """The page-locked part of an arena's slots. Its queries are thread-safe.

    Invariant: the memory stays mapped for as long as any of it is registered.
    """

    def __init__(
        self,
        driver: HostRegister,
        memory: memoryview,
        slot_bytes: int,
        chunk_bytes: int = CHUNK_BYTES,
        on_progress: Callable[[int], None] = lambda _num_slots: None,
    ) -> None:
        """Begin to register the slots, on a thread of its own.

        Args:
            driver: locks the memory.
            memory: the memory of all slots.
            slot_bytes: bytes per slot.
            chunk_bytes: about how much is registered in one call.
            on_progress: called on that thread with the number of slots registered so far.
        """
        self._driver = driver
        self._on_progress = on_progress
        self._memory: memoryview | None = memory
        self._slot_bytes = slot_bytes
        self._address = address_of(memory)
        # No page may belong to two chunks, so each chunk begins at a slot and at a page.
        page_slots = math.lcm(mmap.PAGESIZE, slot_bytes) // slot_bytes
        self._chunk_slots = max(1, chunk_bytes // (slot_bytes * page_slots)) * page_slots
        self._num_slots = len(memory) // slot_bytes
        self._chunks: list[int] = []  # addresses
        self._num_registered = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._register, name="register", daemon=True)
        self._thread.start()

    @property
    def num_slots(self) -> int:
        """Number of registered slots: slots [0, num_slots) are registered."""
        return self._num_registered

    def has(self, last_slot: int) -> bool:
        """Whether all slots up to this one are registered."""
        return last_slot < self._num_registered

    def wait(self) -> int:
        """Wait until registering has ended; returns the number of registered slots."""
        self._thread.join()
        return self._num_registered

    def close(self) -> None:
        """Unregister all memory; no copies may be under way."""
        self._is_closed.set()
        self._thread.join()
        self._num_registered = 0
        for address in self._chunks:
            try:
                self._driver.unregister(address)
            except DriverError as error:
                log.warning("arena_not_unregistered", reason=str(error))
        self._chunks.clear()
        self._memory = None

    def _register(self) -> None:
        """Register chunk after chunk, until all are, one fails, or `close` is called."""
        for first in range(0, self._num_slots, self._chunk_slots):
            if self._is_closed.is_set():
                return
            end = min(first + self._chunk_slots, self._num_slots)
            address = self._address + first * self._slot_bytes
            try:
                self._driver.register(address, (end - first) * self._slot_bytes)
            except DriverError as error:
                log.warning(
                    "arena_not_registered",
                    reason=str(error),
                    registered_bytes=first * self._slot_bytes,
                    all_bytes=self._num_slots * self._slot_bytes,
                )
                return
            self._chunks.append(address)
            self._num_registered = end
            self._on_progress(end)
