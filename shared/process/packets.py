"""Packets: messages with file descriptors between processes of one machine.

The sockets are SOCK_SEQPACKET: one packet is one message, a JSON object with its `kind`. On a
non-blocking socket sending never waits, and `receive` waits on the event loop. On a blocking one
`take` waits in the calling thread.
"""

import array
import asyncio
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Generic, TypeVar, cast

MAX_PACKET_BYTES = 4096
MAX_FDS = 3  # descriptors in one packet
_FD = array.array("i")  # type of descriptors in SCM_RIGHTS

M = TypeVar("M")


class MalformedPacketError(ValueError):
    """A packet that is not a message of its family."""


class PacketFamily(Generic[M]):
    """The messages of one kind of socket: dataclasses, by their `kind`.

    Their fields are strings, numbers ≥ 0 and booleans.
    """

    def __init__(self, kinds: Mapping[str, type[Any]]) -> None:
        """Make a family of these message classes, by `kind`."""
        self.kinds = kinds
        self._names = {cls: kind for kind, cls in kinds.items()}

    def encode(self, message: M) -> bytes:
        """Encode a message as one packet."""
        fields = asdict(cast("Any", message))
        return json.dumps({"kind": self._names[type(message)], **fields}).encode()

    def decode(self, packet: bytes) -> M:
        """Decode one packet.

        Raises:
            MalformedPacketError: it is not exactly one message with all fields of the right types.
        """
        try:
            fields = json.loads(packet)
            cls = self.kinds[fields.pop("kind")]
            message = cls(**fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise MalformedPacketError(
                f"this is not a message of this socket: {packet[:80]!r}"
            ) from error
        for name, kind in cls.__annotations__.items():
            value = getattr(message, name)
            if type(value) is not kind or (kind is int and value < 0):
                raise MalformedPacketError(
                    f"a {self._names[cls]} message has the invalid value {name} = {value!r}"
                )
        return cast("M", message)

    def send(self, sock: socket.socket, message: M, fds: Sequence[int] = ()) -> None:
        """Send one message, with descriptors.

        Raises:
            OSError: the other side is gone, or does not read its packets (BlockingIOError).
        """
        socket.send_fds(sock, [self.encode(message)], fds)


def take(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one packet; b"" when the other side has closed. The caller owns the descriptors.

    Raises:
        OSError: the connection broke, or a packet was truncated; BlockingIOError: there is none.
    """
    # Not socket.recv_fds, which ignores its flags: without MSG_CMSG_CLOEXEC a process that is
    # started at this moment would inherit an arena.
    packet, ancillary, flags, _ = sock.recvmsg(
        MAX_PACKET_BYTES, socket.CMSG_LEN(MAX_FDS * _FD.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    fds = [fd for _, _, data in ancillary for fd in array.array("i", data)]
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_fds(fds)
        raise OSError("a packet was truncated")
    return packet, fds


async def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one packet on the event loop; see `take`."""
    await _readable(sock)
    return take(sock)


def close_fds(fds: Sequence[int]) -> None:
    """Close received descriptors that are not used."""
    for fd in fds:
        os.close(fd)


async def _readable(sock: socket.socket) -> None:
    """Wait until a receive would not block."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():  # the loop calls it again until the packet is read
            ready.set_result(None)

    loop.add_reader(sock.fileno(), wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock.fileno())
