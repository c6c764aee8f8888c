"""What kvd and a copier say to each other; kvd's end of the socket closes, and the copier ends.

kvd                                   copier
starts the process              ->    finds its GPU
<-    ready {}, or unusable {message, remedy}, and it ends
open {channel, arena, …}        ->    maps the arena and the ring
+ slots, ring, channel        <-    opened {channel}, or failed {channel, message}
close {channel}                 ->
<-    closed {channel}: nothing is copied for it any more,
also if its engine has closed it
forget {arena_id}               ->    unmaps an arena that is given up
ping {}                         ->
<-    pong {…}, unless a job takes too long: it is to be killed
"""

from dataclasses import dataclass
from typing import TypeAlias

from shared.process.packets import PacketFamily


@dataclass(frozen=True)
class Ready:
    """The GPU is there."""


@dataclass(frozen=True)
class Unusable:
    """The GPU is not there, and the process ends."""

    message: str
    remedy: str


@dataclass(frozen=True)
class Open:
    """An engine wants a channel."""

    channel: int
    arena_id: str
    slot_bytes: int
    num_slots: int
    ring_bytes: int


@dataclass(frozen=True)
class Opened:
    """It has one."""

    channel: int


@dataclass(frozen=True)
class Failed:
    """It has none."""

    channel: int
    message: str


@dataclass(frozen=True)
class Close:
    """The engine of a channel is gone."""

    channel: int


@dataclass(frozen=True)
class Closed:
    """Nothing is copied for a channel any more."""

    channel: int


@dataclass(frozen=True)
class Forget:
    """An arena is given up; no channel uses it."""

    arena_id: str


@dataclass(frozen=True)
class Ping:
    """Is anybody there?"""


@dataclass(frozen=True)
class Pong:
    """Yes; and what it has done so far."""

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
