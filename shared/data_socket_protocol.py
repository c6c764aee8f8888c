"""Messages of kvd's data socket: one-time attach tokens and arena descriptors (D2, D16). Pure.

The socket is SOCK_SEQPACKET: one packet is one message, a JSON object with its `kind`.

    engine                                kvd
    connect                       ->      checks SO_PEERCRED, opens a pidfd
                                  <-      welcome {token, protocol}
    Attach(data_token) over gRPC  ->      binds that stream to this connection's process
    arena {arena_id}              ->
                                  <-      mapping {slot_bytes, num_slots} + the memfd (SCM_RIGHTS)
    ... the connection stays open: when it closes, the engine is gone and its leases end ...

Anything unexpected is answered with refused {reason, message}, and the connection is closed.
"""

import json
from dataclasses import asdict, dataclass
from typing import TypeAlias

PROTOCOL = 1  # raised when a message changes its meaning
MAX_PACKET_BYTES = 4096
MAX_FDS = 1  # descriptors in one packet


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
    """Answer to ArenaRequest; the arena's descriptor comes in the same packet."""

    slot_bytes: int
    num_slots: int


@dataclass(frozen=True)
class Refused:
    """Why kvd closes this connection."""

    reason: str
    message: str


Message: TypeAlias = Welcome | ArenaRequest | ArenaMapping | Refused

_KINDS: dict[str, type[Welcome] | type[ArenaRequest] | type[ArenaMapping] | type[Refused]] = {
    "welcome": Welcome,
    "arena": ArenaRequest,
    "mapping": ArenaMapping,
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
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedPacketError(f"not a data socket message: {packet[:80]!r}") from error
    for name, kind in cls.__annotations__.items():
        value = getattr(message, name)
        if type(value) is not kind or (kind is int and value < 0):
            raise MalformedPacketError(f"{name} = {value!r} in a data socket message")
    return message
