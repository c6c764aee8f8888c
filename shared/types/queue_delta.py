"""A queue, and changes of it, as one side of PushQueue reports them to the other. Pure.

The digest of a queue is the sum of its jobs' digests modulo 2**64, so that it is kept up to date in
O(1) per change. A job's digest covers its rank, so equal sums mean equal jobs in equal order (up to
chance: 2**-64; nobody is to be fooled).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from shared.types.session_key import SessionKey

Rank = tuple[int, float, int]  # (-priority, start tag, number of the job): lower is sooner
DIGEST_BITS = 64
_MASK = (1 << DIGEST_BITS) - 1
_RANK = Struct("<qdQ")
_RUNNING = Struct("<Q")


class QueuedRequest(NamedTuple):
    """A turn that waits."""

    rank: Rank  # the engine's own order; rank[2] is the job's number, unique within the engine
    key: SessionKey
    history_tokens: int = 0


class RunningRequest(NamedTuple):
    """A turn that is being computed: its session's KV is in the engine's memory."""

    number: int
    key: SessionKey


@dataclass(frozen=True, slots=True)
class QueueChange:
    """What has changed in an engine's queue, or all of it.

    Attributes:
        waiting: jobs that joined, came back, or have another rank.
        running: jobs that are being computed now.
        left: numbers of jobs that neither wait nor run any more.
        interval_ns: mean time between two starts; 0: not known.
    """

    waiting: Sequence[QueuedRequest] = ()
    running: Sequence[RunningRequest] = ()
    left: Sequence[int] = ()
    interval_ns: int = 0


@dataclass(frozen=True, slots=True)
class QueueUpdate:
    """A change as it travels.

    Attributes:
        sequence: above that of the update before it.
        base_sequence: of the update that it changes; 0: it holds all of the queue.
        change: see there.
        digest: of the queue after it, the sum of `waiting_digest` and `running_digest` of its jobs.
    """

    sequence: int
    base_sequence: int
    change: QueueChange
    digest: int


def waiting_digest(rank: Rank, key: SessionKey) -> int:
    """Digest of a job that waits."""
    tenant, _, session_id = key
    return xxh3_64_intdigest(_RANK.pack(*rank) + f"{tenant}/{session_id}".encode())


def waiting_digests(jobs: Iterable[tuple[Rank, SessionKey]]) -> int:
    """Sum of `waiting_digest` of many jobs, in two thirds of the time."""
    digest, pack = xxh3_64_intdigest, _RANK.pack
    return sum([digest(pack(*rank) + f"{key[0]}/{key[2]}".encode()) for rank, key in jobs])


def running_digest(number: int, key: SessionKey) -> int:
    """Digest of a job that is being computed."""
    return xxh3_64_intdigest(_RUNNING.pack(number) + f"{key.tenant}/{key.session_id}".encode())


def combined(digest: int, *, added: int = 0, removed: int = 0) -> int:
    """A queue's digest, after one job's was added or removed."""
    return (digest + added - removed) & _MASK
