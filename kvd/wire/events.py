"""Events for callers of WatchEvents: each has a bounded queue, and a slow one loses the oldest.

The last ones are kept, so that a caller that comes after a thing happened can still see it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.core.records.actions import Emit
from kvd.errors import LimitReachedError
from shared.kvd_client.messages import key_message
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.process.log import get_logger

MAX_WAITING = 1024  # events a watcher may lag behind
MAX_RECENT = 4096  # events that are kept: about 2 MiB
EVENTS_LOST = "events_lost"  # sent to a watcher that was too slow, with their number

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Conditions that all hold; a field's default is no condition.

    Attributes:
        tenants: of the session that an event is about; what is about none is then not meant.
        session_id: of that session.
        names: any of these; none: every name.
    """

    tenants: frozenset[str] | None = None
    session_id: str = ""
    names: frozenset[str] = frozenset()

    def selects(self, event: pb.Event) -> bool:
        """Whether every condition holds for an event."""
        if self.names and event.name not in self.names:
            return False
        if self.tenants is not None and event.session.tenant not in self.tenants:
            return False
        return self.session_id in ("", event.session.session_id)


EVERY_EVENT = EventFilter()


class Watcher:
    """A caller of WatchEvents: the events that it is still to be sent, the newest MAX_WAITING."""

    def __init__(self, wanted: EventFilter) -> None:
        self._wanted = wanted
        self._events: deque[pb.Event] = deque()
        self._some = asyncio.Event()
        self._num_lost = 0

    def __len__(self) -> int:
        """Events that wait."""
        return len(self._events)

    def notify(self, event: pb.Event) -> None:
        """Queue an event if it is meant; the oldest gives way to it."""
        if not self._wanted.selects(event):
            return
        if len(self._events) == MAX_WAITING:
            self._events.popleft()
            self._num_lost += 1
        self._events.append(event)
        self._some.set()

    async def next(self) -> pb.Event:
        """Wait for the next event; after a loss first report that."""
        while not self._events:
            self._some.clear()
            await self._some.wait()
        if self._num_lost:
            num_lost, self._num_lost = self._num_lost, 0
            fields = {"num_events": str(num_lost)}
            return pb.Event(unix_s=time.time(), name=EVENTS_LOST, fields=fields)
        return self._events.popleft()


class EventHub:
    """Fans the engine's events out to the log and to watchers, and keeps the last ones."""

    def __init__(self, max_watchers: int) -> None:
        self._max_watchers = max_watchers
        self._watchers: set[Watcher] = set()
        self._recent: deque[pb.Event] = deque(maxlen=MAX_RECENT)

    def set_bound(self, max_watchers: int) -> None:
        """Let no more than so many watch from now on; those that do may stay."""
        self._max_watchers = max_watchers

    def publish(self, emit: Emit) -> None:
        """Log an event and queue it for every watcher."""
        log.info(emit.name, session=str(emit.key) if emit.key else None, **emit.fields)
        event = pb.Event(unix_s=time.time(), name=emit.name, fields=emit.fields)
        if emit.key is not None:
            event.session.CopyFrom(key_message(emit.key))
        self._recent.append(event)
        for watcher in self._watchers:
            watcher.notify(event)

    def recent(self, wanted: EventFilter, num_events: int) -> list[pb.Event]:
        """Give the last so many events that are meant, oldest first."""
        found: list[pb.Event] = []
        for event in reversed(self._recent):
            if len(found) >= num_events:
                break
            if wanted.selects(event):
                found.append(event)
        return found[::-1]

    def forget(self, tenant: str | None) -> None:
        """Forget what happened to a tenant's sessions (None: everything)."""
        kept = [] if tenant is None else [e for e in self._recent if e.session.tenant != tenant]
        self._recent = deque(kept, maxlen=MAX_RECENT)

    @contextmanager
    def watch(self, wanted: EventFilter = EVERY_EVENT) -> Iterator[Watcher]:
        """Take part until the block is left.

        Raises:
            LimitReachedError: limits.max_watchers watch already.
        """
        if len(self._watchers) >= self._max_watchers:
            raise LimitReachedError(
                f"{len(self._watchers)} watchers are connected", "raise limits.max_watchers"
            )
        watcher = Watcher(wanted)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
