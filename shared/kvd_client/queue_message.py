"""A queue update as a message. Pure; what a peer sends is decoded, and checked, by kvd."""

from collections.abc import Sequence
from typing import Protocol

from shared.pb.kvd.v1 import kvd_pb2
from shared.types.queue_change import QueuedRequest, QueueUpdate
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S


class _Keyed(Protocol):
    @property
    def key(self) -> SessionKey: ...


def snapshot_message(engine_id: int, update: QueueUpdate) -> kvd_pb2.QueueSnapshot:
    """Encode."""
    change = update.change
    tenants: dict[str, int] = {}
    return kvd_pb2.QueueSnapshot(
        engine_id=engine_id,
        sequence=update.sequence,
        base_sequence=update.base_sequence,
        digest=update.digest,
        start_interval_s=change.interval_ns / NS_PER_S,
        waiting=_waiting(change.waiting, tenants),
        running=_jobs([job.number for job in change.running], change.running, tenants),
        left=change.left,
        tenants=tenants,
    )


def _waiting(jobs: Sequence[QueuedRequest], tenants: dict[str, int]) -> kvd_pb2.QueueJobs:
    message = _jobs([job.rank[2] for job in jobs], jobs, tenants)
    message.priorities.extend([-job.rank[0] for job in jobs])
    message.start_tags.extend([job.rank[1] for job in jobs])
    message.history_tokens.extend([job.history_tokens for job in jobs])
    return message


def _jobs(
    numbers: Sequence[int], jobs: Sequence[_Keyed], tenants: dict[str, int]
) -> kvd_pb2.QueueJobs:
    """The columns of all jobs; tenants that are new get the next index."""
    return kvd_pb2.QueueJobs(
        numbers=numbers,
        session_ids=[job.key.session_id for job in jobs],
        tenants=[tenants.setdefault(job.key.tenant, len(tenants)) for job in jobs],
    )
