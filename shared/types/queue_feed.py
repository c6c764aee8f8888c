"""QueueFeed: an engine's queue as it is, and how much of it is not reported to the other side yet.

Pure. The scheduler records what happens to its requests as it happens; the sender takes the next
update when it can send one, so that a request which comes and goes between two updates is never
reported. At most one update is on its way. Of a queue that is longer than the other side takes, its
head is reported: the requests that run, then those that wait, in their order.

Invariants (`check`): 1. a request waits or runs, once; 2. what is reported is a head of the order,
except for requests marked as changed; 3. no more are marked than are worth reporting as a change.
"""

from itertools import chain
from typing import NamedTuple

from sortedcontainers import SortedList

from shared.types.queue_delta import (
    QueueChange,
    QueuedRequest,
    QueueUpdate,
    Rank,
    RunningRequest,
    combined,
    running_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

Position = tuple[bool, int, float, int]  # whether it waits, then its rank; if it runs (0, 0, n)

END: Position = (True, 1 << 63, 0.0, 0)  # after every position
FEW_CHANGES = 1024  # always worth reporting as changes, however short the queue is


class _Request(NamedTuple):
    position: Position
    key: SessionKey
    history_tokens: int
    digest: int


_News = dict[int, _Request | None]  # by number; None: it neither waits nor runs any more


def _nothing() -> None:
    """Nobody listens."""


class QueueFeed:
    """A queue and its unreported changes. A change is O(log n), an update O(log n) per change.

    Attributes:
        on_change: callback after each change.
        interval_s: mean seconds between two starts; 0: unknown. Sent with the next update.
    """

    def __init__(self) -> None:
        self.on_change = _nothing
        self.interval_s = 0.0
        self._requests: dict[int, _Request] = {}
        self._order: SortedList[Position] = SortedList()
        self._sequence = 0
        self._base = 0  # sequence of the newest update; 0: all of the queue is to be sent
        self._reported: dict[int, _Request] = {}  # what the other side has after the newest update
        self._reported_end = END  # the first position that is not reported
        self._reported_digest = 0
        self._changed: set[int] = set()  # since the newest update
        self._is_on_its_way = False

    def __len__(self) -> int:
        return len(self._requests)

    # ------------------------------------------------------------------------------ the scheduler

    def waits(self, rank: Rank, key: SessionKey, history_tokens: int) -> None:
        """Record a request that joined, came back, or has another rank."""
        self._put(_Request((True, *rank), key, history_tokens, waiting_digest(rank, key)))

    def runs(self, number: int, key: SessionKey) -> None:
        """Record a request that is being computed from now on; it may have waited."""
        self._put(_Request((False, 0, 0.0, number), key, 0, running_digest(number, key)))

    def left(self, number: int) -> None:
        """Record a request that neither waits nor runs any more; it need not be in the queue."""
        request = self._requests.pop(number, None)
        if request is not None:
            self._order.remove(request.position)
            self._note(number)

    # -------------------------------------------------------------------------------- the sender

    def next_update(self, most_requests: int) -> QueueUpdate | None:
        """Return all that is not reported yet; None if there is nothing.

        The caller owes `acknowledged`, or `restart`, before the next call.

        Args:
            most_requests: number of requests that the other side takes.
        """
        assert not self._is_on_its_way, "one update at a time"  # noqa: S101
        end = self._order[most_requests] if len(self._order) > most_requests else END
        base = self._base
        news = self._news(end) if base else self._head(end)
        self._reported_end = end
        self._changed.clear()
        if base and not news:
            return None
        self._sequence += 1
        self._base, self._is_on_its_way = self._sequence, True
        change = self._report(news)
        return QueueUpdate(self._sequence, base, change, self._reported_digest)

    def acknowledged(self, sequence: int, *, send_full: bool) -> None:
        """Record that the other side has taken an update, or needs all of the queue."""
        if send_full or not self._is_on_its_way or sequence != self._sequence:
            self._forget_reported()
        self._is_on_its_way = False

    def restart(self) -> None:
        """Forget what was reported: the next update holds all of the queue."""
        self._forget_reported()
        self._is_on_its_way = False

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        positions = sorted(request.position for request in self._requests.values())
        assert list(self._order) == positions  # noqa: S101
        assert all(one.position[3] == number for number, one in self._requests.items())  # noqa: S101
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
        self._note(number)

    def _note(self, number: int) -> None:
        """Mark a request as changed."""
        if self._base:
            self._changed.add(number)
            if len(self._changed) > len(self._reported) + FEW_CHANGES:
                self._forget_reported()
        self.on_change()

    def _forget_reported(self) -> None:
        self._base = self._reported_digest = 0
        self._reported.clear()
        self._changed.clear()

    def _head(self, end: Position) -> _News:
        """Return the requests before a position."""
        positions = self._order.irange(maximum=end, inclusive=(True, False))
        return {position[3]: self._requests[position[3]] for position in positions}

    def _news(self, end: Position) -> _News:
        """Return requests that changed, and those between the old and new end of the report."""
        between = self._order.irange(min(end, self._reported_end), max(end, self._reported_end))
        news: _News = {}
        for number in chain(self._changed, (position[3] for position in between)):
            request = self._requests.get(number)
            if request is not None and request.position >= end:
                request = None
            if request != self._reported.get(number):
                news[number] = request
        return news

    def _report(self, news: _News) -> QueueChange:
        """Count news as reported, and return them as a change."""
        waiting, running, left = [], [], []
        for number, request in news.items():
            before = self._reported.pop(number, None)
            if before is not None:
                self._reported_digest = combined(self._reported_digest, removed=before.digest)
            if request is None:
                left.append(number)
                continue
            self._reported[number] = request
            self._reported_digest = combined(self._reported_digest, added=request.digest)
            if request.position[0]:
                rank = request.position[1:]
                waiting.append(QueuedRequest(rank, request.key, request.history_tokens))
            else:
                running.append(RunningRequest(number, request.key))
        return QueueChange(waiting, running, left, int(self.interval_s * NS_PER_S))
