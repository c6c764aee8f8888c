"""QueueFeed: an engine's queue, and its changes that are not reported to kvd yet.

Pure. The scheduler records what happens to its requests as it happens. The sender takes the next
update when it can send one. So a request that comes and goes between two updates is never reported.
At most one update is in flight. Of a queue longer than kvd accepts, the head is reported: the
running requests, then waiting ones in their order.

Invariants (`check`):
1. a request waits or runs, and is here once;
2. what is reported is a head of the order, except for requests marked as changed;
3. no more are marked than are worth reporting as a change.
"""

from itertools import chain, repeat
from typing import NamedTuple

from sortedcontainers import SortedList

from shared.types.queue_delta import (
    QueueChange,
    QueuedRequests,
    QueueUpdate,
    Rank,
    RunningRequest,
    running_digest,
    update_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

Position = tuple[bool, int, float, int]  # whether it waits, then its rank; running: (0, 0, number)

END: Position = (True, 1 << 63, 0.0, 0)  # after every position
FEW_CHANGES = 1024  # always worth reporting as changes, however short the queue is


class _Request(NamedTuple):
    position: Position
    key: SessionKey
    history_tokens: int
    digest: int


_Changes = dict[int, _Request | None]  # by number; None: it neither waits nor runs any more


def _ignore() -> None:
    """Do nothing: the default callback."""


class QueueFeed:
    """A queue and its unreported changes. A change is O(log n), an update O(log n) per change.

    Attributes:
        on_change: callback after each change.
        interval_s: mean seconds between two starts; 0: unknown. Sent with the next update.
    """

    def __init__(self) -> None:
        self.on_change = _ignore
        self.interval_s = 0.0
        self._requests: dict[int, _Request] = {}
        self._order: SortedList[Position] = SortedList()
        self._sequence = 0
        self._base = 0  # sequence of the newest update; 0: the whole queue has to be sent
        self._reported: dict[int, _Request] = {}  # what kvd has after the newest update
        self._reported_end = END  # the first position that is not reported
        self._reported_digest = 0
        self._changed: set[int] = set()  # since the newest update
        self._is_in_flight = False

    def __len__(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------------------ the scheduler

    def on_wait(self, rank: Rank, key: SessionKey, history_tokens: int) -> None:
        """Record a request that joined, came back, or has another rank."""
        self._put(_Request((True, *rank), key, history_tokens, waiting_digest(rank, key)))

    def on_run(self, number: int, key: SessionKey) -> None:
        """Record a request that runs from now on. It may have waited before."""
        self._put(_Request((False, 0, 0.0, number), key, 0, running_digest(number, key)))

    def on_leave(self, number: int) -> None:
        """Record that a request neither waits nor runs any more. It need not be in the queue."""
        request = self._requests.pop(number, None)
        if request is not None:
            self._order.remove(request.position)
            self._mark_changed(number)

    # -------------------------------------------------------------------------------- the sender

    def next_update(self, most_requests: int) -> QueueUpdate | None:
        """Return all unreported changes as an update; None if there are none.

        The caller has to call `on_acknowledge` or `restart` before the next call.

        Args:
            most_requests: how many requests kvd accepts.
        """
        assert not self._is_in_flight, "one update at a time"  # noqa: S101
        end = self._order[most_requests] if len(self._order) > most_requests else END
        base = self._base
        changes = self._find_changes(end) if base else self._head(end)
        self._reported_end = end
        self._changed.clear()
        if base and not changes:
            return None
        self._sequence += 1
        self._base, self._is_in_flight = self._sequence, True
        change = self._report(changes)
        return QueueUpdate(self._sequence, base, change, self._reported_digest)

    def on_acknowledge(self, sequence: int, *, send_full: bool) -> None:
        """Record that kvd has accepted an update, or needs the whole queue."""
        if send_full or not self._is_in_flight or sequence != self._sequence:
            self._forget_reported()
        self._is_in_flight = False

    def restart(self) -> None:
        """Forget what was reported: the next update holds the whole queue."""
        self._forget_reported()
        self._is_in_flight = False

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        positions = sorted(request.position for request in self._requests.values())
        assert list(self._order) == positions  # noqa: S101
        assert all(r.position[3] == number for number, r in self._requests.items())  # noqa: S101
        assert len(self._changed) <= len(self._reported) + FEW_CHANGES  # noqa: S101
        if self._base:
            head = self._head(self._reported_end)
            different = {n for n in head | self._reported if head.get(n) != self._reported.get(n)}
            assert different <= self._changed  # noqa: S101

    # ------------------------------------------------------------------------------------ inside

    def _put(self, request: _Request) -> None:
        number = request.position[3]
        before = self._requests.get(number)
        if before is not None:
            self._order.remove(before.position)
        self._requests[number] = request
        self._order.add(request.position)
        self._mark_changed(number)

    def _mark_changed(self, number: int) -> None:
        """Mark a request as changed, or give up on changes if they are too many to report."""
        if self._base:
            self._changed.add(number)
            if len(self._changed) > len(self._reported) + FEW_CHANGES:
                self._forget_reported()
        self.on_change()

    def _forget_reported(self) -> None:
        self._base = self._reported_digest = 0
        self._reported.clear()
        self._changed.clear()

    def _head(self, end: Position) -> _Changes:
        """Return the requests before a position."""
        positions = self._order.irange(maximum=end, inclusive=(True, False))
        return {position[3]: self._requests[position[3]] for position in positions}

    def _find_changes(self, end: Position) -> _Changes:
        """Return requests that changed, and those between the old and new end of the report."""
        between = self._order.irange(min(end, self._reported_end), max(end, self._reported_end))
        changes: _Changes = {}
        for number in chain(self._changed, (position[3] for position in between)):
            request = self._requests.get(number)
            if request is not None and request.position >= end:
                request = None
            if request != self._reported.get(number):
                changes[number] = request
        return changes

    def _report(self, changes: _Changes) -> QueueChange:
        """Record changes as reported, and return them as a QueueChange."""
        before = filter(None, map(self._reported.pop, changes, repeat(None)))
        removed = sum([request.digest for request in before])
        current = {number: request for number, request in changes.items() if request is not None}
        self._reported.update(current)
        waiting = [request for request in current.values() if request.position[0]]
        running = [request for request in current.values() if not request.position[0]]
        digest = update_digest(0, added=sum([request.digest for request in waiting]))
        added = digest + sum([request.digest for request in running])
        self._reported_digest = update_digest(self._reported_digest, added=added, removed=removed)
        return QueueChange(
            QueuedRequests(
                [request.position[1:] for request in waiting],
                [request.key for request in waiting],
                [request.history_tokens for request in waiting],
                digest,
            ),
            [RunningRequest(request.position[3], request.key) for request in running],
            [number for number, request in changes.items() if request is None],
            int(self.interval_s * NS_PER_S),
        )
