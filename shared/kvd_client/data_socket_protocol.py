"""kvd's data socket: its messages, and how they travel (D2, D16).

The socket is SOCK_SEQPACKET: one packet is one message, a JSON object with its `kind`.

    engine                                kvd
    connect                       ->      checks SO_PEERCRED, opens a pidfd
                                  <-      welcome {token, protocol}
    Attach(data_token) over gRPC  ->      binds that stream to this connection's process
    arena {arena_id}              ->
                                  <-      mapping {slot_bytes, num_slots, num_words}
                                          + slots, progress words, wakeup (SCM_RIGHTS)
    copier {arena_id, device, …}  ->      if the engine wants one; again when that has died
      + ring in the GPU's memory  <-      channel {} + channel, pidfd of the copier, or no_copier
    ... the connection stays open; kvd sends nothing that was not asked for ...
    leaving {}                    ->      no thread of ours touches a slot any more
    close

What the end of the connection means: after `leaving`, or with the process dead, every lease ends.
Otherwise loads end, and slots that were being written stay with the process until it dies or
attaches again (D10).

Anything unexpected is answered with refused {reason, message}, and the connection is closed.
"""

import socket
from dataclasses import dataclass
from typing import TypeAlias

from shared.process.packets import PacketFamily

PROTOCOL = 2  # raised when a message changes its meaning


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
class CopierRequest:
    """Requests a channel to the copier of a GPU; in the same packet: a ring in its memory.

    Attributes:
        arena_id: of the arena that is mapped.
        device: the GPU's UUID, "GPU-…".
        ring_bytes: size of the ring.
    """

    arena_id: str
    device: str
    ring_bytes: int


@dataclass(frozen=True)
class CopierChannel:
    """Answer to CopierRequest. In the same packet: the channel, and a pidfd of the copier."""


@dataclass(frozen=True)
class NoCopier:
    """The other answer to CopierRequest: why there is none, and what to do about it."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Leaving:
    """Last packet of an engine that ends its attachment in order: it holds nothing any more."""


@dataclass(frozen=True)
class Refused:
    """Why kvd closes this connection."""

    reason: str
    message: str


Message: TypeAlias = (
    Welcome
    | ArenaRequest
    | ArenaMapping
    | CopierRequest
    | CopierChannel
    | NoCopier
    | Leaving
    | Refused
)

DATA_SOCKET_PACKETS = PacketFamily[Message](
    {
        "welcome": Welcome,
        "arena": ArenaRequest,
        "mapping": ArenaMapping,
        "copier": CopierRequest,
        "channel": CopierChannel,
        "no_copier": NoCopier,
        "leaving": Leaving,
        "refused": Refused,
    }
)
encode = DATA_SOCKET_PACKETS.encode
decode = DATA_SOCKET_PACKETS.decode
send = DATA_SOCKET_PACKETS.send


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
