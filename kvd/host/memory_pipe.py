"""A pipe in memory that two processes share; a socket carries only the numbers of bytes.

A socket copies its data into the kernel and out of it, in pieces of some 64 KiB with a wait for
each; that was half of the cost of moving a session. Here the writer copies bytes into the slots of
a ring, one after the other, and sends the number of bytes in each. The reader copies them out, and
sends a packet back for each slot that is empty again. Neither side trusts the other.

Invariant: in each direction no more packets are under way than there are slots, so that no side
waits for room in the socket. The writer must call finish() before it closes the socket: the kernel
drops unread packets when their sender has closed it with packets unread on its own side.
"""

import mmap
import os
import socket
import struct

from kvd.host.sealed_memory import is_sealed, sealed_memfd

NUM_SLOTS = 8
SLOT_BYTES = 512 << 10  # copied at once, with the GIL held
PIPE_BYTES = NUM_SLOTS * SLOT_BYTES  # fits into a processor's cache; fresh memory is slow
_COUNT = struct.Struct("<I")
_EMPTY = b"\0"  # packet of the reader: a slot is empty


def make_memory() -> int:
    """Create the memory of a pipe; return its descriptor, to be sent to the other process.

    Raises:
        OSError: there is no memory.
    """
    return sealed_memfd("kvd-pipe", PIPE_BYTES)


def map_memory(fd: int) -> mmap.mmap:
    """Map the memory of a pipe that the other process has sent.

    Raises:
        OSError: the size is wrong, or the memory is not sealed: the other process could shrink it
            under this one (SIGBUS).
    """
    if not is_sealed(fd) or os.fstat(fd).st_size != PIPE_BYTES:
        raise OSError("the other side sent no sealed memory for the stream")
    return mmap.mmap(fd, PIPE_BYTES)


class MemoryPipe:
    """The writing or the reading end of a pipe. Only one call at a time.

    Args:
        sock: packet socket, connected to the other end. A timeout or a shutdown of it makes a
            waiting call fail.
        memory: the pipe's memory, which both ends map.
    """

    def __init__(self, sock: socket.socket, memory: mmap.mmap) -> None:
        self._sock = sock
        view = memoryview(memory)
        self._slots = [view[i * SLOT_BYTES :][:SLOT_BYTES] for i in range(NUM_SLOTS)]
        self._next_slot = 0  # index of the slot that is written or read next
        self._num_full = 0  # full slots, as far as the writer knows
        self._readable = view[:0]  # unread bytes of the slot that is being read

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes, which may change afterwards; blocks while the ring is full.

        Raises:
            OSError: the reader has closed its end, or does not read in time.
        """
        view = memoryview(data)
        for start in range(0, len(view), SLOT_BYTES):
            piece = view[start : start + SLOT_BYTES]
            if self._num_full == NUM_SLOTS:
                self._wait_for_slot()
            self._take_slot()[: len(piece)] = piece
            self._sock.send(_COUNT.pack(len(piece)))
            self._num_full += 1

    def finish(self) -> None:
        """Wait until the reader has read everything.

        Raises:
            OSError: the reader has closed its end, or does not read in time.
        """
        while self._num_full:
            self._wait_for_slot()

    def read_into(self, memory: memoryview) -> None:
        """Read bytes until `memory` is full; blocks.

        Raises:
            OSError: the writer has closed its end, or does not write in time.
        """
        left = memory
        while left:
            if not self._readable:
                num_bytes = int.from_bytes(self._receive_packet(_COUNT.size), "little")
                if not 0 < num_bytes <= SLOT_BYTES:
                    raise _protocol_error()
                self._readable = self._take_slot()[:num_bytes]
            num_bytes = min(len(self._readable), len(left))
            left[:num_bytes] = self._readable[:num_bytes]
            left, self._readable = left[num_bytes:], self._readable[num_bytes:]
            if not self._readable:
                self._sock.send(_EMPTY)

    def _take_slot(self) -> memoryview:
        """Return the next slot of the ring, and move on."""
        slot = self._slots[self._next_slot]
        self._next_slot = (self._next_slot + 1) % NUM_SLOTS
        return slot

    def _wait_for_slot(self) -> None:
        self._receive_packet(len(_EMPTY))
        self._num_full -= 1

    def _receive_packet(self, num_bytes: int) -> bytes:
        """Wait for a packet of exactly `num_bytes`."""
        packet = self._sock.recv(num_bytes + 1)
        if not packet:
            raise ConnectionResetError("the other side has closed it")
        if len(packet) != num_bytes:
            raise _protocol_error()
        return packet


def _protocol_error() -> OSError:
    return ConnectionAbortedError("the other side broke the protocol of the stream")
