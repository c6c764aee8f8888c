"""Distribution of events to callers of WatchEvents.

Each caller has a bounded queue; a slow caller loses its oldest events. Recent events are kept, so
that a later caller can still see them.
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
MAX_RECENT = 4096  # recent events that are kept: about 2 MiB
EVENTS_LOST = "events_lost"  # event that tells a slow watcher how many events it has lost

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EventFilter:
    """Conditions on events, all of which must hold; a field's default is no condition.

    Attributes:
        tenants: tenants of the event's session; excludes events that are about no session.
        session_id: id of the event's session.
        names: names of events; empty: every name.
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
    """The queue of one caller of WatchEvents: the newest MAX_WAITING events not sent yet."""

    def __init__(self, event_filter: EventFilter) -> None:
        self._filter = event_filter
        self._events: deque[pb.Event] = deque()
        self._has_events = asyncio.Event()
        self._num_lost = 0

    def __len__(self) -> int:
        """Count the events that wait."""
        return len(self._events)

    def notify(self, event: pb.Event) -> None:
        """Queue an event if the filter selects it; a full queue loses its oldest event."""
        if not self._filter.selects(event):
            return
        if len(self._events) == MAX_WAITING:
            self._events.popleft()
            self._num_lost += 1
        self._events.append(event)
        self._has_events.set()

    async def next(self) -> pb.Event:
        """Wait for the next event; after a loss, return EVENTS_LOST first."""
        while not self._events:
            self._has_events.clear()
            await self._has_events.wait()
        if self._num_lost:
            num_lost, self._num_lost = self._num_lost, 0
            fields = {"num_events": str(num_lost)}
            return pb.Event(unix_s=time.time(), name=EVENTS_LOST, fields=fields)
        return self._events.popleft()


class EventHub:
    """Publishes the cache engine's events to the log and to watchers, and keeps recent ones."""

    def __init__(self, max_watchers: int) -> None:
        self._max_watchers = max_watchers
        self._watchers: set[Watcher] = set()
        self._recent: deque[pb.Event] = deque(maxlen=MAX_RECENT)

    def set_bound(self, max_watchers: int) -> None:
        """Change the most watchers; watchers beyond it may stay."""
        self._max_watchers = max_watchers

    def publish(self, emit: Emit) -> None:
        """Log an event, and queue it for every watcher."""
        log.info(emit.name, session=str(emit.key) if emit.key else None, **emit.fields)
        event = pb.Event(unix_s=time.time(), name=emit.name, fields=emit.fields)
        if emit.key is not None:
            event.session.CopyFrom(key_message(emit.key))
        self._recent.append(event)
        for watcher in self._watchers:
            watcher.notify(event)

    def recent(self, event_filter: EventFilter, num_events: int) -> list[pb.Event]:
        """Return the last `num_events` events that the filter selects, oldest first."""
        found: list[pb.Event] = []
        for event in reversed(self._recent):
            if len(found) >= num_events:
                break
            if event_filter.selects(event):
                found.append(event)
        return found[::-1]

    def forget(self, tenant: str | None) -> None:
        """Forget recent events of a tenant's sessions; None: all events."""
        kept = [] if tenant is None else [e for e in self._recent if e.session.tenant != tenant]
        self._recent = deque(kept, maxlen=MAX_RECENT)

    @contextmanager
    def watch(self, event_filter: EventFilter = EVERY_EVENT) -> Iterator[Watcher]:
        """Register a watcher for the duration of the `with` block.

        Raises:
            LimitReachedError: there are limits.max_watchers watchers already.
        """
        if len(self._watchers) >= self._max_watchers:
            raise LimitReachedError(
                f"{len(self._watchers)} watchers are connected, and no more are allowed",
                "raise limits.max_watchers",
            )
        watcher = Watcher(event_filter)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
