"""The queue of an engine, and changes of it, as PushQueue carries them. Pure.

The digest of a queue is the sum of its requests' digests modulo 2**64, so it is kept up to date in
O(1) per change. A request's digest covers its rank, so equal sums mean equal requests in equal
order (up to chance: 2**-64; it guards against errors, not against attacks).

Most of the time of a whole queue would go into its digests. So waiting requests are sent with the
sum of theirs, and with one checksum of all, by which kvd sees that it understands them alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct, pack
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


@dataclass(frozen=True)
class QueuedRequests:
    """Waiting requests as columns: entry i of each column belongs to request i.

    Ten thousand requests take a fraction of the time of as many objects. Iteration yields the
    requests one by one.

    Attributes:
        digest: sum of their `waiting_digest`; 0: not known.
    """

    ranks: Sequence[Rank] = ()
    keys: Sequence[SessionKey] = ()
    history_tokens: Sequence[int] = ()
    digest: int = 0

    def __len__(self) -> int:
        return len(self.ranks)

    def __iter__(self) -> Iterator[QueuedRequest]:
        return map(QueuedRequest, self.ranks, self.keys, self.history_tokens)

    @cached_property
    def numbers(self) -> list[int]:
        """The numbers of the requests."""
        return [number for _, _, number in self.ranks]


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

    waiting: QueuedRequests = QueuedRequests()
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


def columns_checksum(
    digest: int,
    numbers: Sequence[int],
    priorities: Sequence[int],
    tags: Sequence[float],
    tenants: Sequence[str],
    session_ids: Sequence[str],
) -> int:
    """Return a checksum of waiting requests: of what their digests cover, and of the digests' sum.

    Entry i of each sequence belongs to request i. It takes a sixth of the time of the digests.
    """
    num_requests = len(numbers)
    columns = (
        pack(f"<Q{num_requests}Q", digest, *numbers),
        pack(f"<{num_requests}q", *priorities),
        pack(f"<{num_requests}d", *tags),
        "\n".join(tenants).encode(),
        "\n".join(session_ids).encode(),
    )
    return xxh3_64_intdigest(b"\n".join(columns))


def running_digest(number: int, key: SessionKey) -> int:
    """Return the digest of a running request."""
    return xxh3_64_intdigest(_RUNNING.pack(number) + f"{key.tenant}/{key.session_id}".encode())


def update_digest(digest: int, *, added: int = 0, removed: int = 0) -> int:
    """Return a queue's digest after one request's was added or removed."""
    return (digest + added - removed) & _MASK
