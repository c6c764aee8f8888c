"""The queues of all engines in one order: which sessions are needed, and how soon.

Pure. An engine tells its queue in full once, and then what has changed; all of it is forgotten
with the engine. Engines are merged by estimated start: a job's estimate is made when it comes, and
kept between those of its neighbours, so that within one engine the order is the engine's own.

Invariants (`check`): 1. the merged order, and its restriction to each engine, are sorted; 2. a
session is queued exactly while one of its jobs waits, and its place is that of its first job.

*Source:* look-ahead windows over the job queue: CachedAttention §3.3.1.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, repeat
from typing import NamedTuple

from sortedcontainers import SortedList

from shared.types.queue_delta import (
    QueueChange,
    QueuedRequest,
    Rank,
    RunningRequest,
    combined,
    running_digest,
    waiting_digest,
    waiting_digests,
)
from shared.types.session_key import SessionKey

FEW_SHARE = 2  # with fewer changes than one for so many jobs, they are made one by one
BULK_SHARE = 8  # an engine with more than one of so many jobs is dropped by sifting all of them

Touched = dict[SessionKey, None]  # sessions whose jobs are others now, in order


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
        order: ranks of jobs that wait.
        places: of jobs that wait, by number.
        running: sessions of jobs that run, by number.
    """

    interval_ns: int = 0
    digest: int = 0
    order: "SortedList[Rank]" = field(default_factory=SortedList)
    places: dict[int, QueuePlace] = field(default_factory=dict)
    running: dict[int, SessionKey] = field(default_factory=dict)


class QueueWindow:
    """See the module docstring. Changes cost O(log jobs) each.

    Args:
        changed: called after the whole change with the sessions whose places, or whether they run,
            may be others now.
    """

    def __init__(self, changed: Callable[[Touched], None]) -> None:
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
        """Take all of an engine's queue; returns its digest. O(jobs).

        What is known already stays where it is, unless most is new: then all is sorted at once.
        """
        difference = self._difference(owner, jobs)
        if FEW_SHARE * (len(difference.waiting) + len(difference.left)) < len(jobs.waiting):
            return self.change(owner, difference, now_ns)
        touched = self._drop(owner)
        engine = _EngineQueue(jobs.interval_ns)
        if jobs.waiting or jobs.running:
            self._engines[owner] = engine
            self._fill(owner, engine, jobs, now_ns, touched)
        self._changed(touched)
        return engine.digest

    def change(self, owner: int, change: QueueChange, now_ns: int) -> int:
        """Take a change of an engine's queue; returns the digest of what it is now."""
        engine = self._engines.setdefault(owner, _EngineQueue())
        engine.interval_ns = change.interval_ns or engine.interval_ns
        touched: Touched = {}
        for number in change.left:
            self._take_out(engine, number, touched)
        for running in change.running:
            self._take_out(engine, running.number, touched)
            self._run(engine, running, touched)
        for job in sorted(change.waiting):
            self._take_out(engine, job.rank[2], touched)
            self._put_in(owner, engine, job, now_ns, touched)
        self._changed(touched)
        return engine.digest

    def forget(self, owner: int) -> None:
        """Forget an engine and its jobs."""
        self._changed(self._drop(owner))

    # ------------------------------------------------------------------------------------- looking

    @property
    def num_sessions_running(self) -> int:
        """Sessions of which a turn is being computed."""
        return len(self._num_running)

    def is_queued(self, key: SessionKey) -> bool:
        """Whether a turn of the session waits at any engine."""
        return key in self._places

    def not_queued(self, keys: Touched) -> list[SessionKey]:
        """Those of the sessions of which no turn waits at any engine."""
        places = self._places
        return [key for key in keys if key not in places]

    def is_running(self, key: SessionKey) -> bool:
        """Whether a turn of the session is being computed at any engine."""
        return key in self._num_running

    def place(self, key: SessionKey) -> QueuePlace | None:
        """Where the session's first waiting turn stands; None if none waits."""
        places = self._places.get(key)
        return places[0] if places else None

    def place_of(self, key: SessionKey) -> QueuePlace:
        """Where the first waiting turn of a session stands that is queued."""
        return self._places[key][0]

    def place_at(self, index: int) -> QueuePlace | None:
        """Place with so many jobs before it, None if there are no more: O(log jobs)."""
        return self._order[index] if index < len(self._order) else None

    def between(self, one: QueuePlace | None, other: QueuePlace | None) -> Iterator[QueuePlace]:
        """Places from the one to the other, whichever is sooner; None is behind all."""
        bounds = sorted(place for place in (one, other) if place is not None)
        if not bounds:
            return iter(())
        return self._order.irange(bounds[0], bounds[1] if len(bounds) > 1 else None)

    def num_ahead(self, place: QueuePlace) -> int:
        """Jobs before a place: O(log jobs)."""
        return self._order.bisect_left(place)

    def starts_in_ns(self, place: QueuePlace) -> int:
        """Estimated time until the job starts, by the jobs before it at its engine; 0: unknown."""
        engine = self._engines[place.owner]
        return (engine.order.bisect_left(place.rank) + 1) * engine.interval_ns

    def runs(self, owner: int, number: int) -> bool:
        """Whether a job of an engine is being computed."""
        engine = self._engines.get(owner)
        return engine is not None and number in engine.running

    def knows(self, owner: int, number: int) -> bool:
        """Whether a job of an engine waits or runs."""
        engine = self._engines.get(owner)
        return engine is not None and (number in engine.places or number in engine.running)

    def num_waiting(self, owner: int) -> int:
        """Jobs of an engine that wait."""
        engine = self._engines.get(owner)
        return len(engine.places) if engine else 0

    def num_running(self, owner: int) -> int:
        """Jobs of an engine that are being computed."""
        engine = self._engines.get(owner)
        return len(engine.running) if engine else 0

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert list(self._order) == sorted(self._order)
        assert sorted(p for places in self._places.values() for p in places) == list(self._order)
        num_running: dict[SessionKey, int] = {}
        for owner, engine in self._engines.items():
            own = [place for place in self._order if place.owner == owner]
            assert [place.rank for place in own] == list(engine.order) == sorted(engine.order)
            assert {place.rank[2]: place for place in own} == engine.places
            assert not engine.places.keys() & engine.running.keys()
            for key in engine.running.values():
                num_running[key] = num_running.get(key, 0) + 1
            digest = 0
            for place in own:
                digest = combined(digest, added=waiting_digest(place.rank, place.key))
            for number, key in engine.running.items():
                digest = combined(digest, added=running_digest(number, key))
            assert digest == engine.digest
        assert num_running == self._num_running

    # -------------------------------------------------------------------------------- all at once

    def _difference(self, owner: int, jobs: QueueChange) -> QueueChange:
        """What `jobs`, which are all, change in what is known of an engine."""
        engine = self._engines.get(owner)
        if engine is None:
            return jobs
        places, running = engine.places, engine.running
        waiting = [
            job
            for job in jobs.waiting
            if (place := places.get(job.rank[2])) is None or (place.rank, place.key) != job[:2]
        ]
        told = {job.rank[2] for job in jobs.waiting} | {job.number for job in jobs.running}
        return QueueChange(
            waiting,
            [job for job in jobs.running if running.get(job.number) != job.key],
            [number for number in (*places, *running) if number not in told],
            jobs.interval_ns,
        )

    def _fill(
        self, owner: int, engine: _EngineQueue, jobs: QueueChange, now_ns: int, touched: Touched
    ) -> None:
        """Take all jobs of an engine that has none; `_put_in` for each would be six times this."""
        ordered = sorted(jobs.waiting)
        ranks, keys = [job[0] for job in ordered], [job[1] for job in ordered]
        starts_ns = count(now_ns + engine.interval_ns, engine.interval_ns)
        places = list(
            map(partial(tuple.__new__, QueuePlace), zip(starts_ns, repeat(owner), ranks, keys))
        )
        engine.places = {rank[2]: place for rank, place in zip(ranks, places, strict=True)}
        engine.order = SortedList(ranks)
        engine.digest = combined(
            engine.digest, added=waiting_digests(zip(ranks, keys, strict=True))
        )
        self._order.update(places)
        only = dict(zip(keys, map(list, zip(places, strict=True)), strict=True))
        touched.update(dict.fromkeys(only))
        if len(only) == len(keys) and self._places.keys().isdisjoint(only):
            self._places.update(only)
        else:  # some sessions wait more than once
            for place in places:
                insort(self._places.setdefault(place.key, []), place)
        for running in jobs.running:
            self._run(engine, running, touched)

    def _drop(self, owner: int) -> Touched:
        """Forget an engine, and return whose jobs it had."""
        touched: Touched = {}
        engine = self._engines.pop(owner, None)
        if engine is None:
            return touched
        for number in list(engine.running):
            self._take_out(engine, number, touched)
        if BULK_SHARE * len(engine.places) > len(self._order):
            self._order = SortedList(place for place in self._order if place.owner != owner)
        else:
            for place in engine.places.values():
                self._order.remove(place)
        for place in engine.places.values():
            self._vacate(place, touched)
        return touched

    # ------------------------------------------------------------------------------- job by job

    def _put_in(
        self, owner: int, engine: _EngineQueue, job: QueuedRequest, now_ns: int, touched: Touched
    ) -> None:
        order, places = engine.order, engine.places
        index = order.bisect_left(job.rank)
        starts_at_ns = now_ns + (index + 1) * engine.interval_ns
        if index:
            starts_at_ns = max(starts_at_ns, places[order[index - 1][2]].starts_at_ns)
        if index < len(order):
            starts_at_ns = min(starts_at_ns, places[order[index][2]].starts_at_ns)
        place = places[job.rank[2]] = QueuePlace(starts_at_ns, owner, job.rank, job.key)
        order.add(job.rank)
        engine.digest = combined(engine.digest, added=waiting_digest(job.rank, job.key))
        self._order.add(place)
        insort(self._places.setdefault(job.key, []), place)
        touched[job.key] = None

    def _run(self, engine: _EngineQueue, job: RunningRequest, touched: Touched) -> None:
        engine.running[job.number] = job.key
        engine.digest = combined(engine.digest, added=running_digest(job.number, job.key))
        self._num_running[job.key] = self._num_running.get(job.key, 0) + 1
        touched[job.key] = None

    def _take_out(self, engine: _EngineQueue, number: int, touched: Touched) -> None:
        """Forget a job, if it is known."""
        place = engine.places.pop(number, None)
        if place is not None:
            engine.digest = combined(engine.digest, removed=waiting_digest(place.rank, place.key))
            engine.order.remove(place.rank)
            self._order.remove(place)
            self._vacate(place, touched)
        key = engine.running.pop(number, None)
        if key is not None:
            engine.digest = combined(engine.digest, removed=running_digest(number, key))
            self._num_running[key] -= 1
            if not self._num_running[key]:
                del self._num_running[key]
            touched[key] = None

    def _vacate(self, place: QueuePlace, touched: Touched) -> None:
        """The session does not wait there any more."""
        places = self._places[place.key]
        del places[bisect_left(places, place)]
        if not places:
            del self._places[place.key]
        touched[place.key] = None
