"""A pipe in memory that two processes share: its socket carries only how many bytes there are.

A socket copies what it carries into the kernel and out of it, in pieces of some 64 KiB with a wait
for each; that was half of all that it costs to move a session. Here the writer copies bytes into
slots of a ring, one after the other, and sends how many it has put into each; the reader copies
them out and sends a packet back for each slot that is empty again. Neither trusts the other.

Invariant: no more packets are under way, each way, than there are slots, so that nobody waits for
room in the socket. Who writes has to `finish`, for the kernel forgets what was sent by somebody who
has gone with packets unread.
"""

import mmap
import os
import socket
import struct

from kvd.host.sealed_memory import is_sealed, sealed_memfd

NUM_SLOTS = 8
SLOT_BYTES = 512 << 10  # copied at once: no other thread of this process runs meanwhile
PIPE_BYTES = NUM_SLOTS * SLOT_BYTES  # fits into a processor's cache; fresh memory is slow
_COUNT = struct.Struct("<I")
_EMPTY = b"\0"  # a slot is


def make_memory() -> int:
    """Return the memory of a pipe, to be sent to the other process.

    Raises:
        OSError: there is none.
    """
    return sealed_memfd("kvd-pipe", PIPE_BYTES)


def map_memory(fd: int) -> mmap.mmap:
    """Map what the other process has sent as the memory of a pipe.

    Raises:
        OSError: it is not such memory, or could be taken away from under us.
    """
    if not is_sealed(fd) or os.fstat(fd).st_size != PIPE_BYTES:
        raise OSError("it sends no sealed memory of a pipe")
    return mmap.mmap(fd, PIPE_BYTES)


class MemoryPipe:
    """One end of a pipe: one that writes, or one that reads. One call at a time.

    Args:
        sock: of packets, connected to the other end. Who shuts it down, or lets it time out, has
            the call that waits there fail.
        memory: mapped by both.
    """

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        self._sock = sock
        view = memoryview(memory)
        self._slots = [view[i * SLOT_BYTES :][:SLOT_BYTES] for i in range(NUM_SLOTS)]
        self._next = 0  # slot that is written, or read
        self._num_full = 0  # as far as the writer knows
        self._there = view[:0]  # of the slot that is being read

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes; they may change afterwards.

        Raises:
            OSError: the reader takes no more.
        """
        view = memoryview(data)
        for start in range(0, len(view), SLOT_BYTES):
            piece = view[start : start + SLOT_BYTES]
            if self._num_full == NUM_SLOTS:
                self._wait_for_slot()
            self._move()[: len(piece)] = piece
            self._sock.send(_COUNT.pack(len(piece)))
            self._num_full += 1

    def finish(self) -> None:
        """Wait until the reader has taken everything.

        Raises:
            OSError: it does not.
        """
        while self._num_full:
            self._wait_for_slot()

    def read_into(self, memory: memoryview) -> None:
        """Read as many bytes as there is memory for.

        Raises:
            OSError: they do not come.
        """
        left = memory
        while left:
            if not self._there:
                num_bytes = int.from_bytes(self._received(_COUNT.size), "little")
                if not 0 < num_bytes <= SLOT_BYTES:
                    raise _broken_rules()
                self._there = self._move()[:num_bytes]
            num_bytes = min(len(self._there), len(left))
            left[:num_bytes] = self._there[:num_bytes]
            left, self._there = left[num_bytes:], self._there[num_bytes:]
            if not self._there:
                self._sock.send(_EMPTY)

    def _move(self) -> memoryview:
        """Return the next slot."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        return slot

    def _wait_for_slot(self) -> None:
        self._received(len(_EMPTY))
        self._num_full -= 1

    def _received(self, num_bytes: int) -> bytes:
        """Wait for a packet."""
        packet = self._sock.recv(num_bytes + 1)
        if not packet:
            raise ConnectionResetError("the other side has closed it")
        if len(packet) != num_bytes:
            raise _broken_rules()
        return packet


def _broken_rules() -> OSError:
    return ConnectionAbortedError("the other side breaks the rules")
