"""Changes of queues, for tests that name their waiting requests one by one."""

from collections.abc import Iterable, Sequence

from shared.types.queue_delta import QueueChange, QueuedRequest, QueuedRequests, RunningRequest


def queue_change(
    waiting: Iterable[QueuedRequest] = (),
    running: Sequence[RunningRequest] = (),
    left: Sequence[int] = (),
    interval_ns: int = 0,
) -> QueueChange:
    """Return a change with the waiting requests as columns."""
    rows = list(waiting)
    columns = QueuedRequests(
        [request.rank for request in rows],
        [request.key for request in rows],
        [request.history_tokens for request in rows],
    )
    return QueueChange(columns, running, left, interval_ns)
