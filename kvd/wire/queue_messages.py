"""What engines tell of their queues, decoded and checked. Pure.

A job may be told once in a message. Everything else that a message may say is harmless: of jobs
that kvd does not know, of changes that change nothing.
"""

from collections.abc import Sequence
from math import isfinite
from operator import neg
from typing import TypeVar

from kvd.core.records.errors import InvalidRequestError
from kvd.wire.messages import ns_of
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.queue_change import QueueChange, QueuedRequest, QueueUpdate, RunningRequest
from shared.types.session_key import SessionKey, session_keys

EQUAL_COLUMNS = "send columns of one length, or leave one out"

Number = TypeVar("Number", int, float)


def queue_update(message: kvd_pb2.QueueSnapshot, model: str, max_jobs: int) -> QueueUpdate:
    """Decode and check; sessions are of `model`.

    Raises:
        InvalidInputError: it makes no sense, or tells more than `max_jobs` jobs.
    """
    numbers = [*message.waiting.numbers, *message.running.numbers, *message.left]
    check_num_jobs(max(len(numbers) - len(message.left), len(message.left)), max_jobs)
    if len(set(numbers)) < len(numbers):
        raise _nonsense("a job that comes twice", "tell each number once: waiting, running or left")
    if message.left and not message.base_sequence:
        raise _nonsense("all of a queue with jobs that left", "tell only the others")
    if message.start_interval_s < 0:
        raise _nonsense(f"an interval of {message.start_interval_s} s", "send 0 if it is not known")
    change = QueueChange(
        _waiting(message, model),
        list(map(RunningRequest, message.running.numbers, _keys(message, message.running, model))),
        list(message.left),
        ns_of(message.start_interval_s),
    )
    return QueueUpdate(message.sequence, message.base_sequence, change, message.digest)


def check_num_jobs(num_jobs: int, max_jobs: int) -> None:
    """Raise InvalidRequestError if an engine tells more jobs than it may."""
    if num_jobs > max_jobs:
        raise InvalidRequestError(
            f"a queue of {num_jobs} jobs", f"send the first {max_jobs} (limits.max_queue_jobs)"
        )


def _waiting(message: kvd_pb2.QueueSnapshot, model: str) -> list[QueuedRequest]:
    jobs = message.waiting
    num_jobs = len(jobs.numbers)
    tags = _column(jobs.start_tags, num_jobs, 0.0)
    if not isfinite(sum(tags)) or min(tags, default=0.0) < 0:
        raise _nonsense("a start tag that is no tag", "send finite numbers, not below 0")
    priorities = _column(jobs.priorities, num_jobs, 0)
    ranks = zip(map(neg, priorities), tags, jobs.numbers, strict=True)
    history_tokens = _column(jobs.history_tokens, num_jobs, 0)
    rows = zip(ranks, _keys(message, jobs, model), history_tokens, strict=True)
    return list(map(QueuedRequest._make, rows))


def _keys(message: kvd_pb2.QueueSnapshot, jobs: kvd_pb2.QueueJobs, model: str) -> list[SessionKey]:
    names = list(message.tenants) or [""]
    indexes = _column(jobs.tenants, len(jobs.numbers), 0)
    if max(indexes, default=0) >= len(names):
        raise _nonsense("a tenant that is not named", "send its index in `tenants`")
    session_ids = jobs.session_ids[:]
    if len(session_ids) != len(jobs.numbers):
        raise _nonsense(f"{len(jobs.numbers)} jobs of {len(session_ids)} sessions", EQUAL_COLUMNS)
    return session_keys([names[index] for index in indexes], model, session_ids)


def _column(values: Sequence[Number], num_jobs: int, default: Number) -> Sequence[Number]:
    """A column that may be left out."""
    if len(values) not in (0, num_jobs):
        raise _nonsense(f"{num_jobs} jobs with a column of {len(values)}", EQUAL_COLUMNS)
    return values[:] or [default] * num_jobs


def _nonsense(what: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"a queue snapshot with {what}", remedy)
