"""Records of the agenda: its steps, and its knowledge of a session. Pure."""

from dataclasses import dataclass

from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Push:
    """The step to push a session to the store.

    Attributes:
        takes: take the session over if another server owns it in the store, as it continues here.
    """

    key: SessionKey
    takes: bool = False


@dataclass(frozen=True)
class Drop:
    """The step to drop a session from the store.

    Attributes:
        unix_s: when it was deleted here. What was stored there later is kept: the session began
            again.
        of_others: drop it even if another server owns it in the store.
    """

    key: SessionKey
    unix_s: float
    of_others: bool


Step = Push | Drop


@dataclass(frozen=True)
class Terms:
    """Properties of a session whose change makes a push necessary."""

    num_tokens: int
    ttl_s: float
    pin: int
    retain_s: float


def terms_of(info: pb.SessionInfo) -> Terms:
    """Return the terms of a session that kvd has described."""
    return Terms(info.num_tokens, info.ttl_s, info.pin, info.retain_s)


@dataclass(slots=True)
class Unpushed:
    """A session that may be missing in the store, or be older there.

    Attributes:
        first_s: when it was first stored, or reported as near eviction, since its last push.
        last_s: when that happened last.
        is_new: an event reported it; False: it was found in a listing.
        is_superseded: another session continues in its place, so its push can wait.
        is_dirty: it is not wholly on SSD yet.
        is_late: a part of it was evicted already.
        num_failures: pushes of it that failed since it was stored.
        not_before_s: the earliest time of the next try.
    """

    first_s: float
    last_s: float
    num_tokens: int
    is_new: bool
    is_superseded: bool = False
    is_dirty: bool = True
    is_pinned: bool = False
    is_late: bool = False
    num_failures: int = 0
    not_before_s: float = 0.0


def unpushed_of(info: pb.SessionInfo, used_s: float) -> Unpushed:
    """Return the record of a session that a listing shows; it was last used at `used_s`."""
    return Unpushed(
        used_s,
        used_s,
        info.num_tokens,
        is_new=False,
        is_superseded=info.superseded,
        is_dirty=bool(info.dirty_bytes),
        is_pinned=info.pin != pb.PIN_NONE,
    )
