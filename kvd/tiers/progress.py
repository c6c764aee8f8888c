"""Progress words: how many layers of a load that is under way an engine may read already (D13).

One aligned 64-bit word per load lease, in memory that engines map read-only. A word is written with
one store, so a reader sees an old word or a new one. Its bits: shared/kvd_client/arena_map.py.
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

F_SEAL_FUTURE_WRITE = 0x0010  # fcntl names it from Python 3.13 on: nobody else may map it writable


class Wakeup:
    """Two sockets of one engine's connection: a byte is sent after its words, its event loop reads.

    Not an eventfd: its two sides share one file description, whose peer can fill it and make it
    blocking just after we have looked, and then holds the thread that writes. Of a socket pair each
    side is its own. Any thread may call wake(), also after close().

    Attributes:
        fd: what engines get.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._lock = threading.Lock()  # no byte may fall on a number that was given anew

    @property
    def fd(self) -> int:
        """The engine's end; -1 after close()."""
        return self._theirs.fileno()

    def wake(self) -> None:
        """Let the engine look at its words."""
        with self._lock, suppress(OSError):  # full: then it will look; closed, by it or by us
            self._ours.send(b"w")

    def close(self) -> None:
        """Close our descriptors."""
        with self._lock:
            self._ours.close()
            self._theirs.close()


class Progress:
    """All progress words of one arena. Any thread may call any method.

    Attributes:
        fd: descriptor of the memory, readable only: what engines get.
        num_words: how many loads can be under way at once.
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
        self._open: dict[int, tuple[int, Callable[[], None]]] = {}  # lease → index, who waits

    def open(self, lease_id: int, wake: Callable[[], None]) -> int | None:
        """Take a word for a load; `wake` is called after each change of it.

        Returns:
            Its index; None if none is left: that load is then answered when it is complete.
        """
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
            self._open[lease_id] = (index, wake)
            self._words[index] = packed_word(lease_id, 0)
            return index

    def publish(self, lease_id: int, layers_ready: int) -> None:
        """Say that layers [0, layers_ready) may be read. They are never taken back.

        Words are named by their lease: a read that ends after its load was cancelled must not touch
        the word of the next one.
        """
        self._change(lease_id, lambda word: max(word, (word & ~LAYERS_MASK) | layers_ready))

    def fail(self, lease_id: int) -> None:
        """Say that the load failed: no more layers will come."""
        self._change(lease_id, lambda word: word | FAILED_BIT)

    def close(self, lease_id: int) -> None:
        """Give a word back; whoever still looks at it sees that it is not its lease's any more."""
        with self._lock:
            index, wake = self._open.pop(lease_id, (-1, None))
            if wake is None:
                return
            self._words[index] = packed_word(~lease_id, 0) | FAILED_BIT
            self._free.append(index)
        wake()

    def close_all(self) -> None:
        """Give the memory up; engines that map it keep it alive. A second call does nothing."""
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
            if wake is None:  # cancelled meanwhile
                return
            self._words[index] = change(int(self._words[index]))
        wake()
