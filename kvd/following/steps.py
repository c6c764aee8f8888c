"""What the agenda has done, and what it knows of a session. Pure."""

from dataclasses import dataclass

from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Push:
    """A session is to be pushed.

    Attributes:
        takes: even if another server owns it there: it goes on here.
    """

    key: SessionKey
    takes: bool = False


@dataclass(frozen=True)
class Drop:
    """A session is to be dropped from the store.

    Attributes:
        unix_s: when it was dropped here: what the store has of a later time is another life of it.
        of_others: even if another server owns it there.
    """

    key: SessionKey
    unix_s: float
    of_others: bool


Step = Push | Drop


@dataclass(frozen=True)
class Terms:
    """What a session is, and for how long it is kept."""

    num_tokens: int
    ttl_s: float
    pin: int
    retain_s: float


def terms_of(info: pb.SessionInfo) -> Terms:
    """Return a session's terms."""
    return Terms(info.num_tokens, info.ttl_s, info.pin, info.retain_s)


@dataclass(slots=True)
class Unpushed:
    """A session that may be missing in the store.

    Attributes:
        first_s: when it was first stored since it was pushed, or said to be near eviction.
        last_s: when it was stored last, or that was said.
        is_new: whether that was heard of; else it was found in a listing.
        is_late: a part of it was evicted already.
    """

    first_s: float
    last_s: float
    num_tokens: int
    is_new: bool
    is_over: bool = False
    is_dirty: bool = True
    is_pinned: bool = False
    is_late: bool = False
    num_failures: int = 0
    not_before_s: float = 0.0


def found(info: pb.SessionInfo, used_s: float) -> Unpushed:
    """Return a session that was found in a listing, and was used then."""
    return Unpushed(
        used_s,
        used_s,
        info.num_tokens,
        is_new=False,
        is_over=info.superseded,
        is_dirty=bool(info.dirty_bytes),
        is_pinned=info.pin != pb.PIN_NONE,
    )
