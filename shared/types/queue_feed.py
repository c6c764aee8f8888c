"""QueueFeed: an engine's queue as it is, and how much of it the other side does not know yet.

Pure. The scheduler notes what happens to its jobs as it happens; whoever sends asks for the next
update when it can send one, so that a job which comes and goes between two updates is never
reported. At most one update is on its way. Of a queue that is longer than the other side takes, its
head is reported: the jobs that run, then those that wait, in their order.

Invariants (`check`): 1. a job waits or runs, once; 2. what is reported is a head of the order,
except for jobs noted as changed; 3. no more is noted than is worth reporting as a change.
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

Place = tuple[bool, int, float, int]  # whether it waits, then its rank; of one that runs (0, 0, n)

END: Place = (True, 1 << 63, 0.0, 0)  # after every place
FEW_CHANGES = 1024  # always worth noting, however short the queue is


class _Job(NamedTuple):
    place: Place
    key: SessionKey
    history_tokens: int
    digest: int


_News = dict[int, _Job | None]  # by number; None: it is not there any more


def _nothing() -> None:
    """Nobody listens."""


class QueueFeed:
    """See the module docstring. Every change is O(log jobs), an update O(log jobs) per change.

    Attributes:
        on_change: called after each change.
        interval_s: mean time between two starts; 0: not known. Sent with the next update.
    """

    def __init__(self) -> None:
        self.on_change = _nothing
        self.interval_s = 0.0
        self._jobs: dict[int, _Job] = {}
        self._order: SortedList[Place] = SortedList()
        self._sequence = 0
        self._base = 0  # of the newest update; 0: the other side is to be sent all
        self._reported: dict[int, _Job] = {}  # what the other side has after the newest update
        self._reported_end = END  # the first place that is not reported
        self._reported_digest = 0
        self._changed: set[int] = set()  # since the newest update
        self._is_on_its_way = False

    def __len__(self) -> int:
        return len(self._jobs)

    # ------------------------------------------------------------------------------ the scheduler

    def waits(self, rank: Rank, key: SessionKey, history_tokens: int) -> None:
        """A job joined, came back, or has another rank."""
        self._put(_Job((True, *rank), key, history_tokens, waiting_digest(rank, key)))

    def runs(self, number: int, key: SessionKey) -> None:
        """A job is being computed from now on; it may have waited."""
        self._put(_Job((False, 0, 0.0, number), key, 0, running_digest(number, key)))

    def left(self, number: int) -> None:
        """A job neither waits nor runs any more; it need not be known."""
        job = self._jobs.pop(number, None)
        if job is not None:
            self._order.remove(job.place)
            self._note(number)

    # -------------------------------------------------------------------------------- the sender

    def next_update(self, most_jobs: int) -> QueueUpdate | None:
        """What the other side, which takes so many jobs, does not know yet; None: it knows all.

        The caller owes `acknowledged`, or `restart`, before asking again.
        """
        assert not self._is_on_its_way, "one update at a time"  # noqa: S101
        end = self._order[most_jobs] if len(self._order) > most_jobs else END
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
        """The other side has taken an update, or asks for all of the queue."""
        if send_full or not self._is_on_its_way or sequence != self._sequence:
            self._forget_reported()
        self._is_on_its_way = False

    def restart(self) -> None:
        """The other side knows nothing: the next update holds all."""
        self._forget_reported()
        self._is_on_its_way = False

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        places = sorted(job.place for job in self._jobs.values())
        assert list(self._order) == places  # noqa: S101
        assert all(job.place[3] == number for number, job in self._jobs.items())  # noqa: S101
        assert len(self._changed) <= len(self._reported) + FEW_CHANGES  # noqa: S101
        if self._base:
            head = self._head(self._reported_end)
            different = {n for n in head | self._reported if head.get(n) != self._reported.get(n)}
            assert different <= self._changed  # noqa: S101

    # ------------------------------------------------------------------------------------ inside

    def _put(self, job: _Job) -> None:
        number = job.place[3]
        known = self._jobs.get(number)
        if known is not None:
            self._order.remove(known.place)
        self._jobs[number] = job
        self._order.add(job.place)
        self._note(number)

    def _note(self, number: int) -> None:
        """A job has changed."""
        if self._base:
            self._changed.add(number)
            if len(self._changed) > len(self._reported) + FEW_CHANGES:
                self._forget_reported()
        self.on_change()

    def _forget_reported(self) -> None:
        self._base = self._reported_digest = 0
        self._reported.clear()
        self._changed.clear()

    def _head(self, end: Place) -> _News:
        """The jobs before a place."""
        places = self._order.irange(maximum=end, inclusive=(True, False))
        return {place[3]: self._jobs[place[3]] for place in places}

    def _news(self, end: Place) -> _News:
        """Jobs that have changed, and those between the old end of what is reported and the new."""
        between = self._order.irange(min(end, self._reported_end), max(end, self._reported_end))
        news: _News = {}
        for number in chain(self._changed, (place[3] for place in between)):
            job = self._jobs.get(number)
            if job is not None and job.place >= end:
                job = None
            if job != self._reported.get(number):
                news[number] = job
        return news

    def _report(self, news: _News) -> QueueChange:
        """Count news as reported, and return them as a change."""
        waiting, running, left = [], [], []
        for number, job in news.items():
            known = self._reported.pop(number, None)
            if known is not None:
                self._reported_digest = combined(self._reported_digest, removed=known.digest)
            if job is None:
                left.append(number)
                continue
            self._reported[number] = job
            self._reported_digest = combined(self._reported_digest, added=job.digest)
            if job.place[0]:
                waiting.append(QueuedRequest(job.place[1:], job.key, job.history_tokens))
            else:
                running.append(RunningRequest(number, job.key))
        return QueueChange(waiting, running, left, int(self.interval_s * NS_PER_S))
