"""Packets and descriptors over a real socket."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from shared.kvd_client import data_socket_protocol as packets
from shared.process.packets import MAX_FDS, close_fds, receive


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


async def test_descriptors_are_sent_with_a_packet(pair):
    """A descriptor arrives as another number for the same file, not inherited by children."""
    fd = os.memfd_create("test")
    os.write(fd, b"content")
    socket.send_fds(pair[0], [b"packet"], [fd])
    packet, (received,) = await receive(pair[1])
    assert packet == b"packet"
    assert os.pread(received, 7, 0) == b"content"
    assert not os.get_inheritable(received)
    close_fds([fd, received])


async def test_receiving_waits_and_sees_the_end(pair):
    """The end is an empty packet."""
    waiting = asyncio.ensure_future(receive(pair[1]))
    await asyncio.sleep(0)
    assert not waiting.done()
    pair[0].send(b"late")
    assert (await waiting)[0] == b"late"
    pair[0].close()
    assert await receive(pair[1]) == (b"", [])


async def test_oversized_packets_are_an_error(pair):
    """A packet that does not fit is not cut."""
    pair[0].send(b"x" * 5000)
    with pytest.raises(OSError, match="truncated"):
        await receive(pair[1])


async def test_too_many_descriptors_are_an_error_and_closed(pair):
    """Unexpected descriptors are not kept open."""
    before = _num_open()
    fds = [os.memfd_create(str(number)) for number in range(MAX_FDS + 2)]
    socket.send_fds(pair[0], [b"packet"], fds)
    with pytest.raises(OSError, match="truncated"):
        await receive(pair[1])
    close_fds(fds)
    assert _num_open() == before


def _num_open():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_connecting_without_a_listener(tmp_path):
    """It fails at once."""
    with pytest.raises(OSError, match="No such file"):
        packets.connect(str(tmp_path / "nobody"))


async def test_a_cancelled_receive_leaves_no_reader(pair):
    """After a cancelled receive the next one gets the packet."""
    waiting = asyncio.ensure_future(receive(pair[1]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    pair[0].send(b"next")
    assert (await receive(pair[1]))[0] == b"next"
