"""The queue of an engine, and changes of it, as PushQueue carries them. Pure.

The digest of a queue is the sum of its requests' digests modulo 2**64, so it is kept up to date in
O(1) per change. A request's digest covers its rank, so equal sums mean equal requests in equal
order (up to chance: 2**-64; it guards against errors, not against attacks).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from shared.types.session_key import SessionKey

Rank = tuple[int, float, int]  # (-priority, start tag, number of the request): lower is sooner
DIGEST_BITS = 64
_MASK = (1 << DIGEST_BITS) - 1
_RANK = Struct("<qdQ")
_RUNNING = Struct("<Q")


class QueuedRequest(NamedTuple):
    """A waiting request."""

    rank: Rank  # the engine's own order; rank[2] is its number, unique within the engine
    key: SessionKey
    history_tokens: int = 0


class RunningRequest(NamedTuple):
    """A running request: its session's KV is in the engine's memory."""

    number: int
    key: SessionKey


@dataclass(frozen=True, slots=True)
class QueueChange:
    """Changes of an engine's queue, or the whole queue.

    Attributes:
        waiting: requests that joined, came back, or have another rank.
        running: requests that run now.
        left: numbers of requests that neither wait nor run any more.
        interval_ns: mean nanoseconds between the starts of two requests; 0: unknown.
    """

    waiting: Sequence[QueuedRequest] = ()
    running: Sequence[RunningRequest] = ()
    left: Sequence[int] = ()
    interval_ns: int = 0


@dataclass(frozen=True, slots=True)
class QueueUpdate:
    """A change as it is sent.

    Attributes:
        sequence: number of this update, higher than that of the one before.
        base_sequence: number of the update that it changes; 0: it holds the whole queue.
        change: the changes, or the whole queue.
        digest: digest of the queue after it: the sum of its requests' `waiting_digest` and
            `running_digest`.
    """

    sequence: int
    base_sequence: int
    change: QueueChange
    digest: int


def waiting_digest(rank: Rank, key: SessionKey) -> int:
    """Return the digest of a waiting request."""
    tenant, _, session_id = key
    return xxh3_64_intdigest(_RANK.pack(*rank) + f"{tenant}/{session_id}".encode())


def waiting_digests(requests: Iterable[tuple[Rank, SessionKey]]) -> int:
    """Return the sum of `waiting_digest` of many requests, in two thirds of the time."""
    digest, pack = xxh3_64_intdigest, _RANK.pack
    return sum([digest(pack(*rank) + f"{key[0]}/{key[2]}".encode()) for rank, key in requests])


def running_digest(number: int, key: SessionKey) -> int:
    """Return the digest of a running request."""
    return xxh3_64_intdigest(_RUNNING.pack(number) + f"{key.tenant}/{key.session_id}".encode())


def update_digest(digest: int, *, added: int = 0, removed: int = 0) -> int:
    """Return a queue's digest after one request's was added or removed."""
    return (digest + added - removed) & _MASK
