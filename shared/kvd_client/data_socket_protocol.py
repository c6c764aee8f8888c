"""Messages of kvd's data socket: one-time attach tokens and arena descriptors (D2, D16). Pure.

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
"""

import json
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
    """Asks for the descriptor of the arena that Attached named."""

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
    """One packet."""
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
