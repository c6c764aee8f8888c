"""Events for whoever watches: each watcher has a bounded queue, and a slow one loses the oldest."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvd.core.actions import Emit
from kvd.errors import LimitReachedError
from kvd.messages import key_message
from shared.log import get_logger
from shared.pb.kvd.v1 import kvd_pb2

MAX_WAITING = 1024  # events a watcher may lag behind

log = get_logger(__name__)


class EventHub:
    """Fans the engine's events out to the log and to watchers."""

    def __init__(self, max_watchers: int) -> None:
        self._max_watchers = max_watchers
        self._queues: set[asyncio.Queue[kvd_pb2.Event]] = set()

    def publish(self, emit: Emit) -> None:
        """Log an event and queue it for every watcher."""
        log.info(emit.name, session=str(emit.key) if emit.key else None, **emit.fields)
        event = kvd_pb2.Event(unix_s=time.time(), name=emit.name, fields=emit.fields)
        if emit.key is not None:
            event.session.CopyFrom(key_message(emit.key))
        for queue in self._queues:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    @contextmanager
    def watch(self) -> Iterator[asyncio.Queue[kvd_pb2.Event]]:
        """Take part until the block is left.

        Raises:
            LimitReachedError: limits.max_watchers watch already.
        """
        if len(self._queues) >= self._max_watchers:
            raise LimitReachedError(
                f"{len(self._queues)} watchers are connected", "raise limits.max_watchers"
            )
        queue: asyncio.Queue[kvd_pb2.Event] = asyncio.Queue(MAX_WAITING)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)
