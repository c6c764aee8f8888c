"""Progress words: how many layers an engine may read of a load that is under way (D13).

Each load lease has one aligned 64-bit word, in memory that engines map read-only. A word is written
with one store, so a reader sees the old word or the new one. shared/kvd_client/arena_map.py
describes its bits.
"""

import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from shared.kvd_client.arena_map import FAILED_BIT, LAYERS_MASK, WORD_BYTES, packed_word
from shared.types.units import SECTOR_BYTES, align_up

F_SEAL_FUTURE_WRITE = 0x0010  # no further writable mappings; fcntl has it from Python 3.13 on


class Wakeup:
    """A socket pair that wakes one engine's event loop after its progress words have changed.

    Not an eventfd: both sides of an eventfd share one file description. A malicious engine could
    fill it and make it blocking right after kvd has checked it, and so block the thread that
    writes. In a socket pair each side has its own. Any thread may call wake(), also after close().

    Attributes:
        fd: the engine's end.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        # Guards against a byte sent to a descriptor number that was closed and given to another
        # file.
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """The engine's end; -1 after close()."""
        return self._theirs.fileno()

    def wake(self) -> None:
        """Wake the engine, so that it reads its words; never blocks."""
        # Full: the engine has unread bytes, and so will wake. Closed: nobody waits any more.
        with self._lock, suppress(OSError):
            self._ours.send(b"w")

    def close(self) -> None:
        """Close kvd's descriptors of both ends."""
        with self._lock:
            self._ours.close()
            self._theirs.close()


class Progress:
    """All progress words of one arena. Any thread may call any method.

    Attributes:
        fd: read-only descriptor of the memory, which engines receive.
        num_words: number of loads that can have a word at once.
    """

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        size = align_up(num_words * WORD_BYTES, SECTOR_BYTES)
        fd = os.memfd_create("kvd-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._words = memoryview(self._memory).cast("Q")
        self._lock = threading.Lock()
        self._free = list(range(num_words - 1, -1, -1))
        self._open: dict[int, tuple[int, Callable[[], None]]] = {}  # lease → word's index, wake

    def open(self, lease_id: int, wake: Callable[[], None]) -> int | None:
        """Allocate a word for a load.

        Args:
            lease_id: lease of the load.
            wake: called after each change of the word.

        Returns:
            The word's index; None if all are used: the load is then answered once it is complete.
        """
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
            self._open[lease_id] = (index, wake)
            self._words[index] = packed_word(lease_id, 0)
            return index

    def publish(self, lease_id: int, layers_ready: int) -> None:
        """Publish that layers [0, layers_ready) may be read. A smaller number changes nothing.

        Words are found by lease: a read that ends after its load was cancelled must not change the
        word of the next load.
        """
        self._change(lease_id, lambda word: max(word, (word & ~LAYERS_MASK) | layers_ready))

    def fail(self, lease_id: int) -> None:
        """Publish that the load failed: no more layers will come."""
        self._change(lease_id, lambda word: word | FAILED_BIT)

    def close(self, lease_id: int) -> None:
        """Release a load's word.

        The word gets another lease's bits, so that a late reader sees that it is no longer valid.
        """
        with self._lock:
            index, wake = self._open.pop(lease_id, (-1, None))
            if wake is None:
                return
            self._words[index] = packed_word(~lease_id, 0) | FAILED_BIT
            self._free.append(index)
        wake()

    def close_all(self) -> None:
        """Unmap the memory, which lives on while engines map it. A second call does nothing."""
        with self._lock:
            self._open.clear()
            self._free.clear()
            self._words.release()
            self._memory.close()
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def _change(self, lease_id: int, change: Callable[[int], int]) -> None:
        with self._lock:
            index, wake = self._open.get(lease_id, (-1, None))
            if wake is None:  # the load was cancelled meanwhile
                return
            self._words[index] = change(int(self._words[index]))
        wake()
