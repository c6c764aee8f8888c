"""kvd's data socket: its messages, and how they travel (D2, D16).

The socket is SOCK_SEQPACKET: one packet is one message, a JSON object with its `kind`.

    engine                                kvd
    connect                       ->      checks SO_PEERCRED, opens a pidfd
                                  <-      welcome {token, protocol}
    Attach(data_token) over gRPC  ->      binds that stream to this connection's process
    arena {arena_id}              ->
                                  <-      mapping {slot_bytes, num_slots, num_words}
                                          + slots, progress words, wakeup (SCM_RIGHTS)
    ... the connection stays open; kvd sends nothing more over it ...
    leaving {}                    ->      no thread of ours touches a slot any more
    close

What the end of the connection means: after `leaving`, or with the process dead, every lease ends.
Otherwise loads end, and slots that were being written stay with the process until it dies or
attaches again (D10).

Anything unexpected is answered with refused {reason, message}, and the connection is closed.
Sending never waits; receiving waits on the event loop.
"""

import array
import asyncio
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

PROTOCOL = 2  # raised when a message changes its meaning
MAX_PACKET_BYTES = 4096
MAX_FDS = 3  # descriptors in one packet


class MalformedPacketError(ValueError):
    """A packet that is none of the messages below."""


@dataclass(frozen=True)
class Welcome:
    """First packet of kvd: the token that Attach presents, usable once."""

    token: str
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class ArenaRequest:
    """Requests the descriptor of the arena that Attached named."""

    arena_id: str


@dataclass(frozen=True)
class ArenaMapping:
    """Answer to ArenaRequest. In the same packet: slots, progress words (read-only), wakeup."""

    slot_bytes: int
    num_slots: int
    num_words: int


@dataclass(frozen=True)
class Leaving:
    """Last packet of an engine that ends its attachment in order: it holds nothing any more."""


@dataclass(frozen=True)
class Refused:
    """Why kvd closes this connection."""

    reason: str
    message: str


Message: TypeAlias = Welcome | ArenaRequest | ArenaMapping | Leaving | Refused

_KINDS: dict[str, type[Message]] = {
    "welcome": Welcome,
    "arena": ArenaRequest,
    "mapping": ArenaMapping,
    "leaving": Leaving,
    "refused": Refused,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


def encode(message: Message) -> bytes:
    """Encode a message as one packet."""
    return json.dumps({"kind": _NAMES[type(message)], **asdict(message)}).encode()


def decode(packet: bytes) -> Message:
    """Parse one packet.

    Raises:
        MalformedPacketError: if it is not exactly one message with its fields in their types.
    """
    try:
        fields = json.loads(packet)
        cls = _KINDS[fields.pop("kind")]
        message = cls(**fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedPacketError(f"not a data socket message: {packet[:80]!r}") from error
    for name, kind in cls.__annotations__.items():
        value = getattr(message, name)
        if type(value) is not kind or (kind is int and value < 0):
            raise MalformedPacketError(f"{name} = {value!r} in a data socket message")
    return message


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


def send(sock: socket.socket, message: Message, fds: Sequence[int] = ()) -> None:
    """Send one message and the descriptors that ride along.

    Raises:
        OSError: the other side is gone, or does not read what it is sent (BlockingIOError).
    """
    socket.send_fds(sock, [encode(message)], fds)


async def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for one packet; b"" when the other side has closed. The caller owns the descriptors.

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
    """Close descriptors that came along and are not used."""
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
