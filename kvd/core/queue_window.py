"""The queues of all engines in one order: which sessions are needed, and how soon.

Pure. An engine tells its queue in full once, and then what has changed; all of it is forgotten
with the engine. Engines are merged by estimated start: a job's estimate is made when it comes, and
kept between those of its neighbours, so that within one engine the order is the engine's own.

Invariants (`check`): 1. the merged order, and its restriction to each engine, are sorted; 2. a
session is queued exactly while one of its jobs waits, and its place is that of its first job.

*Source:* look-ahead windows over the job queue: CachedAttention §3.3.1.
"""

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from sortedcontainers import SortedDict, SortedList

from shared.queue_digest import Rank, combined, running_digest, waiting_digest
from shared.session_key import SessionKey


class QueuedJob(NamedTuple):
    """A turn that waits."""

    rank: Rank  # the engine's own order; rank[2] is the job's number, unique within the engine
    key: SessionKey
    history_tokens: int = 0


class RunningJob(NamedTuple):
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

    waiting: Sequence[QueuedJob] = ()
    running: Sequence[RunningJob] = ()
    left: Sequence[int] = ()
    interval_ns: int = 0


class QueuePlace(NamedTuple):
    """Where a job stands among those of all engines; lower is sooner."""

    starts_at_ns: int  # estimate
    owner: int
    rank: Rank
    key: SessionKey


@dataclass(slots=True)
class _EngineQueue:
    """One engine's jobs.

    Attributes:
        places: of jobs that wait, by rank.
        ranks: of jobs that wait, by number.
        running: sessions of jobs that run, by number.
    """

    interval_ns: int = 0
    digest: int = 0
    places: "SortedDict[Rank, QueuePlace]" = field(default_factory=SortedDict)
    ranks: dict[int, Rank] = field(default_factory=dict)
    running: dict[int, SessionKey] = field(default_factory=dict)


class QueueWindow:
    """See the module docstring. Changes cost O(log jobs) each.

    Args:
        changed: called with each session whose place, or whether it runs, may be another now;
            after the whole change.
    """

    def __init__(self, changed: Callable[[SessionKey], None]) -> None:
        self._changed = changed
        self._engines: dict[int, _EngineQueue] = {}
        self._order: SortedList[QueuePlace] = SortedList()
        self._places: dict[SessionKey, list[QueuePlace]] = {}  # sorted
        self._num_running: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        """Jobs that wait."""
        return len(self._order)

    def __iter__(self) -> Iterator[SessionKey]:
        """Sessions of the jobs that wait, soonest first; one may come twice."""
        return (place.key for place in self._order)

    # ------------------------------------------------------------------------------------ changing

    def replace(self, owner: int, jobs: QueueChange, now_ns: int) -> int:
        """Take all of an engine's queue; returns its digest."""
        engine = self._engines.get(owner)
        known = {job.rank[2] for job in jobs.waiting} | {job.number for job in jobs.running}
        gone = () if engine is None else {*engine.ranks, *engine.running} - known
        return self.change(
            owner, QueueChange(jobs.waiting, jobs.running, [*gone], jobs.interval_ns), now_ns
        )

    def change(self, owner: int, change: QueueChange, now_ns: int) -> int:
        """Take a change of an engine's queue; returns the digest of what it is now."""
        engine = self._engines.setdefault(owner, _EngineQueue())
        engine.interval_ns = change.interval_ns or engine.interval_ns
        touched: dict[SessionKey, None] = {}
        for number in change.left:
            self._take_out(engine, number, touched)
        for running in change.running:
            self._take_out(engine, running.number, touched)
            self._run(engine, running, touched)
        for job in sorted(change.waiting):
            self._take_out(engine, job.rank[2], touched)
            self._put_in(owner, engine, job, now_ns, touched)
        for key in touched:
            self._changed(key)
        return engine.digest

    def forget(self, owner: int) -> None:
        """Forget an engine and its jobs."""
        engine = self._engines.pop(owner, None)
        if engine is None:
            return
        touched: dict[SessionKey, None] = {}
        for number in [*engine.ranks, *engine.running]:
            self._take_out(engine, number, touched)
        for key in touched:
            self._changed(key)

    # ------------------------------------------------------------------------------------- looking

    def is_queued(self, key: SessionKey) -> bool:
        """Whether a turn of the session waits at any engine."""
        return key in self._places

    def is_running(self, key: SessionKey) -> bool:
        """Whether a turn of the session is being computed at any engine."""
        return key in self._num_running

    def place(self, key: SessionKey) -> QueuePlace | None:
        """Where the session's first waiting turn stands; None if none waits."""
        places = self._places.get(key)
        return places[0] if places else None

    def num_ahead(self, place: QueuePlace) -> int:
        """Jobs before a place: O(log jobs)."""
        return self._order.bisect_left(place)

    def key_at(self, index: int) -> SessionKey:
        """Whose job has so many before it: O(log jobs)."""
        return self._order[index].key

    def first(self, num_jobs: int) -> Iterator[SessionKey]:
        """Sessions of the next jobs, soonest first; one may come twice."""
        return islice(self, num_jobs)

    def starts_in_ns(self, place: QueuePlace) -> int:
        """Estimated time until the job starts, by the jobs before it at its engine; 0: unknown."""
        engine = self._engines[place.owner]
        return (engine.places.bisect_left(place.rank) + 1) * engine.interval_ns

    def num_jobs(self, owner: int) -> int:
        """Jobs of an engine that wait."""
        engine = self._engines.get(owner)
        return len(engine.ranks) if engine else 0

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert list(self._order) == sorted(self._order)
        assert sorted(p for places in self._places.values() for p in places) == list(self._order)
        num_running: dict[SessionKey, int] = {}
        for owner, engine in self._engines.items():
            own = [place for place in self._order if place.owner == owner]
            assert own == list(engine.places.values()) == sorted(own, key=lambda p: p.rank)
            assert {number: place.rank for place in own for number in place.rank[2:]} == (
                engine.ranks
            )
            assert not engine.ranks.keys() & engine.running.keys()
            for key in engine.running.values():
                num_running[key] = num_running.get(key, 0) + 1
            digest = 0
            for place in own:
                digest = combined(digest, added=waiting_digest(place.rank, place.key))
            for number, key in engine.running.items():
                digest = combined(digest, added=running_digest(number, key))
            assert digest == engine.digest
        assert num_running == self._num_running

    # -------------------------------------------------------------------------------------- inside

    def _put_in(
        self,
        owner: int,
        engine: _EngineQueue,
        job: QueuedJob,
        now_ns: int,
        touched: dict[SessionKey, None],
    ) -> None:
        index = engine.places.bisect_left(job.rank)
        starts_at_ns = now_ns + (index + 1) * engine.interval_ns
        around = engine.places.values()
        if index:
            starts_at_ns = max(starts_at_ns, around[index - 1].starts_at_ns)
        if index < len(around):
            starts_at_ns = min(starts_at_ns, around[index].starts_at_ns)
        place = QueuePlace(starts_at_ns, owner, job.rank, job.key)
        engine.places[job.rank] = place
        engine.ranks[job.rank[2]] = job.rank
        engine.digest = combined(engine.digest, added=waiting_digest(job.rank, job.key))
        self._order.add(place)
        insort(self._places.setdefault(job.key, []), place)
        touched[job.key] = None

    def _run(self, engine: _EngineQueue, job: RunningJob, touched: dict[SessionKey, None]) -> None:
        engine.running[job.number] = job.key
        engine.digest = combined(engine.digest, added=running_digest(job.number, job.key))
        self._num_running[job.key] = self._num_running.get(job.key, 0) + 1
        touched[job.key] = None

    def _take_out(self, engine: _EngineQueue, number: int, touched: dict[SessionKey, None]) -> None:
        """Forget a job, if it is known."""
        rank = engine.ranks.pop(number, None)
        if rank is not None:
            self._stop_waiting(engine, engine.places.pop(rank), touched)
        key = engine.running.pop(number, None)
        if key is not None:
            engine.digest = combined(engine.digest, removed=running_digest(number, key))
            self._num_running[key] -= 1
            if not self._num_running[key]:
                del self._num_running[key]
            touched[key] = None

    def _stop_waiting(
        self, engine: _EngineQueue, place: QueuePlace, touched: dict[SessionKey, None]
    ) -> None:
        key = place.key
        self._order.remove(place)
        engine.digest = combined(engine.digest, removed=waiting_digest(place.rank, key))
        places = self._places[key]
        places.remove(place)
        if not places:
            del self._places[key]
        touched[key] = None
