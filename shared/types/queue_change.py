"""What one side of PushQueue tells the other: jobs, and changes of a queue. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.types.queue_digest import Rank
from shared.types.session_key import SessionKey


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
        base_sequence: of the update that it changes; 0: it tells all of the queue.
        change: see there.
        digest: of the queue after it, by shared/types/queue_digest.py.
    """

    sequence: int
    base_sequence: int
    change: QueueChange
    digest: int
