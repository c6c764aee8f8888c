"""Shared memory of kvd that an engine maps: an arena's slots, and the progress words of its loads.

The slots are mapped shared and writable; kvd and engines use the same class. Progress words are
mapped read-only: a thread waits on a word until a layer of its load is there (D13). A word has 64
bits, little-endian, and belongs to one load lease:

    bits 0-15    layers ready: layers [0, n) of the whole grant are in the slots, and verified
    bit  16      FAILED: no more layers will come
    bits 32-63   low 32 bits of the lease id: a word with another id says nothing about our lease

kvd writes the word, then a byte to the wakeup of our connection. One reader on the event loop
drains the wakeup and wakes all waiting threads; the end of the attachment wakes them, too.
"""

import mmap
import os
import threading
import time

from shared.process.dumps import exclude_from_dumps
from shared.types.errors import LoadFailedError
from shared.types.units import align_up


class ArenaMap:
    """The slots of one arena, mapped shared and writable.

    Invariant: a returned memoryview stays valid for as long as it is referred to. The memory is
    unmapped when this object and the last view are gone; close() only prevents new views.
    """

    def __init__(self, fd: int, slot_bytes: int, num_slots: int) -> None:
        """Map `fd`, which the caller may close afterwards.

        Args:
            fd: the file of the slots.
            slot_bytes: size of a slot.
            num_slots: number of slots.

        Raises:
            ValueError: the file is smaller than the slots, or there are none.
            OSError: it cannot be mapped.
        """
        size = slot_bytes * num_slots
        if size <= 0 or os.fstat(fd).st_size < size:
            raise ValueError(
                f"the arena has {os.fstat(fd).st_size} bytes, but kvd announced {size}"
            )
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        # Map whole huge pages where the file has them: the kernel cannot unmap a part of one.
        mapped = min(align_up(size, os.fstat(fd).st_blksize), os.fstat(fd).st_size)
        mapping = mmap.mmap(fd, mapped)
        exclude_from_dumps(mapping)
        self._view: memoryview | None = memoryview(mapping)

    @property
    def memory(self) -> memoryview:
        """The memory of all slots, up to the end of its last page.

        Raises:
            ValueError: the arena is closed.
        """
        if self._view is None:
            raise ValueError("the arena is closed")
        return self._view

    def slot(self, slot_id: int) -> memoryview:
        """Return the writable memory of one slot, `slot_bytes` long.

        Raises:
            ValueError: there is no such slot, or the arena is closed.
        """
        if self._view is None or not 0 <= slot_id < self.num_slots:
            raise ValueError(f"there is no slot {slot_id} in an arena of {self.num_slots} slots")
        start = slot_id * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def close(self) -> None:
        """Return no more views of slots; the memory is unmapped when the last view is gone."""
        self._view = None


WORD_BYTES = 8
LAYERS_MASK = 0xFFFF
FAILED_BIT = 1 << 16
LEASE_SHIFT = 32
LEASE_MASK = 0xFFFFFFFF


def packed_word(lease_id: int, layers_ready: int) -> int:
    """Encode a progress word."""
    return (lease_id & LEASE_MASK) << LEASE_SHIFT | layers_ready


def lease_bits(word: int) -> int:
    """Return the low 32 bits of the id of the lease that a word belongs to."""
    return word >> LEASE_SHIFT & LEASE_MASK


class ProgressWords:
    """The progress words of one arena, mapped read-only, and the threads that wait for them.

    Thread-safe.
    """

    def __init__(self, fd: int, num_words: int) -> None:
        """Map `fd`, which the caller may close afterwards.

        Args:
            fd: the file of the words.
            num_words: number of words.

        Raises:
            ValueError: the file is smaller than the words, or there are none.
            OSError: it cannot be mapped.
        """
        size = num_words * WORD_BYTES
        if size <= 0 or os.fstat(fd).st_size < size:
            raise ValueError(f"the progress words have {os.fstat(fd).st_size} bytes, not {size}")
        self.num_words = num_words
        self._memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        # Cast to 64-bit items: kvd writes words while we read, and reading an item is atomic.
        self._words = memoryview(self._memory).cast("Q")
        self._changed = threading.Condition()
        self._ended_reason = ""

    def word(self, index: int) -> int:
        """Return the value of a word."""
        return int(self._words[index])

    def wake(self) -> None:
        """Wake every waiting thread to read its word again."""
        with self._changed:
            self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Fail all waits, now and later, because kvd no longer writes the words."""
        with self._changed:
            self._ended_reason = self._ended_reason or reason
            self._changed.notify_all()

    def wait(self, index: int, lease_id: int, layers: int, timeout_s: float) -> None:
        """Wait until layers [0, layers) of a lease are ready; see LoadProgress.wait_layer."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._is_ready(index, lease_id, layers):
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise _load_failed(
                        f"layer {layers - 1} has not arrived within {timeout_s:.1f} s"
                    )
                self._changed.wait(left_s)

    def _is_ready(self, index: int, lease_id: int, layers: int) -> bool:
        """Whether the first layers of a load are ready; raises LoadFailedError if they fail."""
        word = self.word(index)
        if lease_bits(word) != lease_id & LEASE_MASK or word & FAILED_BIT:
            raise _load_failed("kvd could not read it")
        if self._ended_reason:
            raise _load_failed(self._ended_reason)
        return word & LAYERS_MASK >= layers


class LoadProgress:
    """The progress of one load whose blocks kvd is still reading."""

    def __init__(self, words: ProgressWords, index: int, lease_id: int) -> None:
        self._words = words
        self._index = index
        self._lease_id = lease_id

    def wait_layer(self, layer_index: int, timeout_s: float) -> None:
        """Block this thread until a layer may be read; never call it on the event loop's thread.

        Raises:
            LoadFailedError: the layer will not arrive, kvd has gone, or timeout_s has passed.
        """
        self._words.wait(self._index, self._lease_id, layer_index + 1, timeout_s)


def _load_failed(why: str) -> LoadFailedError:
    return LoadFailedError(f"a load failed before it was complete: {why}", "load again")
