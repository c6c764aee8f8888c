"""The protocol of kvd's data socket: its messages and their order (D2, D16).

The socket is SOCK_SEQPACKET: one packet is one message, a JSON object with its `kind`.

    engine                                kvd
    connect                       ->      checks SO_PEERCRED, opens a pidfd
                                  <-      welcome {token, protocol}
    Attach(data_token) over gRPC  ->      binds that stream to this connection's process
    arena {arena_id}              ->
                                  <-      mapping {slot_bytes, num_slots, num_words}
                                          + slots, progress words, wakeup (SCM_RIGHTS)
    copier {arena_id, device, …}  ->      optional; again when a copier has died
      + ring in the GPU's memory  <-      channel {} + channel, pidfd of the copier, or no_copier
    calls {arena_id}              ->      optional, once: see CallFrame in the .proto file
                                  <-      call_socket {} + a stream socket
    ... the connection stays open; kvd sends only what was requested ...
    leaving {}                    ->      no thread of the engine uses a slot any more
    close

When the connection ends after `leaving`, or with the process, every lease ends. Otherwise loads
end, and the slots of stores stay reserved for the process until it dies or attaches again (D10).

Anything unexpected is answered with refused {reason, message}, and the connection is closed.
"""

import socket
from dataclasses import dataclass
from typing import TypeAlias

from shared.process.packets import PacketFamily

PROTOCOL = 2  # raised when a message changes its meaning


@dataclass(frozen=True)
class Welcome:
    """First packet of kvd: a token for one Attach call."""

    token: str
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class ArenaRequest:
    """Requests the descriptors of the arena that Attached named."""

    arena_id: str


@dataclass(frozen=True)
class ArenaMapping:
    """Answer to ArenaRequest, with descriptors: slots, progress words (read-only), wakeup."""

    slot_bytes: int
    num_slots: int
    num_words: int


@dataclass(frozen=True)
class CopierRequest:
    """Requests a channel to the copier of a GPU, with the descriptor of a ring in its memory.

    Attributes:
        arena_id: id of the mapped arena.
        device: the GPU's UUID, "GPU-…".
        ring_bytes: size of the ring.
    """

    arena_id: str
    device: str
    ring_bytes: int


@dataclass(frozen=True)
class CopierChannel:
    """Answer to CopierRequest, with descriptors: the channel, and a pidfd of the copier."""


@dataclass(frozen=True)
class NoCopier:
    """Negative answer to CopierRequest: why there is no copier, and the remedy."""

    message: str
    remedy: str


@dataclass(frozen=True)
class CallsRequest:
    """Requests a socket for calls without gRPC; `arena_id` is that of the mapped arena."""

    arena_id: str


@dataclass(frozen=True)
class CallSocket:
    """Answer to CallsRequest, with the descriptor of a stream socket."""


@dataclass(frozen=True)
class Leaving:
    """Last packet of an engine that ends its attachment in order, and uses no slots any more."""


@dataclass(frozen=True)
class Refused:
    """Last packet of kvd: why it closes this connection."""

    reason: str
    message: str


Message: TypeAlias = (
    Welcome
    | ArenaRequest
    | ArenaMapping
    | CopierRequest
    | CopierChannel
    | NoCopier
    | CallsRequest
    | CallSocket
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
        "calls": CallsRequest,
        "call_socket": CallSocket,
        "leaving": Leaving,
        "refused": Refused,
    }
)
encode = DATA_SOCKET_PACKETS.encode
decode = DATA_SOCKET_PACKETS.decode
send = DATA_SOCKET_PACKETS.send


def connect(path: str) -> socket.socket:
    """Connect without waiting: a Unix socket accepts or refuses at once.

    Raises:
        OSError: no process listens there, or its backlog is full.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    try:
        sock.connect(path)
    except BaseException:
        sock.close()
        raise
    return sock
