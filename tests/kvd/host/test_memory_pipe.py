"""Bytes through shared memory arrive in order; misbehaving and vanished peers are noticed."""

import os
import socket
import threading
from collections.abc import Iterator
from random import Random

import pytest

from kvd.host.memory_pipe import (
    NUM_SLOTS,
    PIPE_BYTES,
    SLOT_BYTES,
    MemoryPipe,
    make_memory,
    map_memory,
)
from kvd.host.sealed_memory import sealed_memfd

Ends = tuple[MemoryPipe, MemoryPipe, socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Make a writer, a reader, and their sockets."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = make_memory()
    with ours, theirs:
        for sock in (ours, theirs):
            sock.settimeout(20.0)
        yield (
            MemoryPipe(ours, map_memory(memory)),
            MemoryPipe(theirs, map_memory(memory)),
            ours,
            theirs,
        )
    os.close(memory)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_unchanged(ends: Ends, seed: int) -> None:
    """Whatever the sizes of the pieces: some fill the ring, some are a single byte."""
    writer, reader, _, _ = ends
    random = Random(seed)  # noqa: S311
    data = random.randbytes(3 * PIPE_BYTES)
    sizes = (1, 7, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, PIPE_BYTES + 3)

    def pieces() -> Iterator[slice]:
        start = 0
        while start < len(data):
            num_bytes = random.choice(sizes)
            yield slice(start, min(start + num_bytes, len(data)))
            start += num_bytes

    written, wanted = list(pieces()), list(pieces())
    received = bytearray(len(data))

    def write() -> None:
        for piece in written:
            writer.write(data[piece])
        writer.finish()

    writing = threading.Thread(target=write)
    writing.start()
    for piece in wanted:
        reader.read_into(memoryview(received)[piece])
    writing.join()
    assert received == data


def test_a_writer_may_be_ahead_by_the_ring(ends: Ends) -> None:
    """Then it waits; after it has finished nothing is lost, even if it leaves."""
    writer, reader, ours, _ = ends
    ours.settimeout(0.1)
    for number in range(NUM_SLOTS):
        writer.write(bytes([number]))
    with pytest.raises(TimeoutError):
        writer.write(b"one too many")
    received = bytearray(NUM_SLOTS)
    reader.read_into(memoryview(received))
    writer.finish()
    assert received == bytes(range(NUM_SLOTS))


def test_a_vanished_peer_is_noticed(ends: Ends) -> None:
    """By both sides."""
    writer, reader, ours, theirs = ends
    ours.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionResetError):
        reader.read_into(memoryview(bytearray(1)))
    theirs.close()
    with pytest.raises(BrokenPipeError):
        writer.write(b"x")


@pytest.mark.parametrize(
    "packet", [b"\0\0\0\0", (SLOT_BYTES + 1).to_bytes(4, "little"), b"12345", b"123"]
)
def test_a_writer_that_breaks_the_rules(ends: Ends, packet: bytes) -> None:
    """No byte outside of the slot is read."""
    _, reader, ours, _ = ends
    ours.send(packet)
    with pytest.raises(ConnectionAbortedError):
        reader.read_into(memoryview(bytearray(1)))


def test_memory_that_may_disappear_is_refused(tmp_path) -> None:
    """A file, memory that can shrink, and memory of another size."""
    shrinks, other = os.memfd_create("pipe"), sealed_memfd("pipe", PIPE_BYTES // 2)
    os.ftruncate(shrinks, PIPE_BYTES)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, PIPE_BYTES)
    for fd in (shrinks, other, file):
        with pytest.raises(OSError, match="sealed memory"):
            map_memory(fd)
        os.close(fd)
