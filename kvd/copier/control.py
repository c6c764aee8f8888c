"""Messages between kvd and a copier. When kvd's end of the socket is closed, the copier ends.

kvd                                   copier
starts the process              ->    finds its GPU
                                <-    ready {}, or unusable {message, remedy}: then it ends
open {channel, arena, …}        ->    maps the arena and the ring
  + slots, ring, channel        <-    opened {channel}, or failed {channel, message}
close {channel}                 ->
                                <-    closed {channel}: nothing is copied for it any more;
                                      also sent after its engine has closed it
forget {arena_id}               ->    unmaps an arena that kvd has released
ping {}                         ->
                                <-    pong {…}; none while a job is stuck: kvd kills the copier
"""

from dataclasses import dataclass
from typing import TypeAlias

from shared.process.packets import PacketFamily


@dataclass(frozen=True)
class Ready:
    """The copier has found its GPU."""


@dataclass(frozen=True)
class Unusable:
    """The copier cannot use its GPU, and ends."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Open:
    """Open a channel for an engine.

    Attributes:
        channel: number of the channel.
        arena_id: id of the arena.
        slot_bytes: size of a slot.
        num_slots: number of the arena's slots.
        ring_bytes: size of the engine's ring.
    """

    channel: int
    arena_id: str
    slot_bytes: int
    num_slots: int
    ring_bytes: int


@dataclass(frozen=True)
class Opened:
    """The channel is open."""

    channel: int


@dataclass(frozen=True)
class Failed:
    """The channel could not be opened."""

    channel: int
    message: str


@dataclass(frozen=True)
class Close:
    """Close a channel whose engine is gone."""

    channel: int


@dataclass(frozen=True)
class Closed:
    """A channel is closed: nothing is copied for it any more."""

    channel: int


@dataclass(frozen=True)
class Forget:
    """Unmap an arena that kvd has released, unless a channel uses it."""

    arena_id: str


@dataclass(frozen=True)
class Ping:
    """Request a Pong."""


@dataclass(frozen=True)
class Pong:
    """The copier is alive; its counts so far.

    Attributes:
        jobs: number of finished jobs.
        loaded_bytes: bytes copied from slots to rings.
        stored_bytes: bytes copied from rings to slots.
        registered_bytes: bytes of arenas that are locked for the GPU now.
    """

    jobs: int
    loaded_bytes: int
    stored_bytes: int
    registered_bytes: int


Message: TypeAlias = (
    Ready | Unusable | Open | Opened | Failed | Close | Closed | Forget | Ping | Pong
)

CONTROL = PacketFamily[Message](
    {
        "ready": Ready,
        "unusable": Unusable,
        "open": Open,
        "opened": Opened,
        "failed": Failed,
        "close": Close,
        "closed": Closed,
        "forget": Forget,
        "ping": Ping,
        "pong": Pong,
    }
)
