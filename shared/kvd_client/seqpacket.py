"""Sending and receiving the data socket's packets, with descriptors, from an event loop."""

import array
import asyncio
import os
import socket
from collections.abc import Sequence

from shared.kvd_client.data_socket_protocol import MAX_FDS, MAX_PACKET_BYTES

_FD = array.array("i")  # how descriptors travel in SCM_RIGHTS


def connect(path: str) -> socket.socket:
    """Connect without waiting: a Unix socket accepts at once or refuses.

    Raises:
        OSError: nobody listens there, or its backlog is full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock


def send(sock: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """Send one packet and the descriptors that ride along.

    Raises:
        OSError: the peer is gone, or does not read what it is sent (BlockingIOError).
    """
    socket.send_fds(sock, [packet], fds)


async def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one packet; b"" when the peer has closed. The caller owns the descriptors.

    Raises:
        OSError: the connection broke, or a packet was cut short.
    """
    await _readable(sock)
    # Not socket.recv_fds: it drops its flags. A process forked meanwhile must not inherit an arena.
    packet, ancillary, flags, _ = sock.recvmsg(
        MAX_PACKET_BYTES, socket.CMSG_LEN(MAX_FDS * _FD.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = [fd for _, _, data in ancillary for fd in array.array("i", data)]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_fds(fds)
        raise OSError("a packet was cut short")
    return packet, fds


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors that came along and are not wanted."""
    for fd in fds:
        os.close(fd)


async def _readable(sock: socket.socket) -> None:
    """Wait until a receive would not block."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():  # called again for as long as nobody has read
            ready.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
