"""The queues of all engines in one order: which sessions are needed, and how soon.

Pure. An engine reports its queue in full once, and then what has changed; all of it is forgotten
with the engine. Engines are merged by estimated start: a request's estimate is made when it comes,
and kept between those of its neighbours, so that within one engine the order is the engine's own.

Invariants (`check`): 1. the merged order, and its restriction to each engine, are sorted; 2. a
session is queued exactly while a request of it waits, and its place is that of its first one.

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

FEW_SHARE = 2  # with fewer changes than one for so many requests, they are made one by one
BULK_SHARE = 8  # an engine with more than one of so many requests is dropped by sifting all of them

Touched = dict[SessionKey, None]  # sessions whose requests are others now, in order


class QueuePlace(NamedTuple):
    """Where a request stands among those of all engines; lower is sooner."""

    starts_at_ns: int  # estimate
    engine_id: int
    rank: Rank
    key: SessionKey


@dataclass(slots=True)
class _EngineQueue:
    """One engine's requests.

    Attributes:
        order: ranks of requests that wait.
        places: of requests that wait, by number.
        running: sessions of requests that run, by number.
    """

    interval_ns: int = 0
    digest: int = 0
    order: "SortedList[Rank]" = field(default_factory=SortedList)
    places: dict[int, QueuePlace] = field(default_factory=dict)
    running: dict[int, SessionKey] = field(default_factory=dict)


class QueueWindow:
    """See the module docstring. Changes cost O(log requests) each.

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
        """Requests that wait."""
        return len(self._order)

    def __iter__(self) -> Iterator[SessionKey]:
        """Sessions of the requests that wait, soonest first; one may come twice."""
        return (place.key for place in self._order)

    # ------------------------------------------------------------------------------------ changing

    def replace(self, engine_id: int, queue: QueueChange, now_ns: int) -> int:
        """Take all of an engine's queue; returns its digest. O(requests).

        What is known already stays where it is, unless most is new: then all is sorted at once.
        """
        difference = self._difference(engine_id, queue)
        if FEW_SHARE * (len(difference.waiting) + len(difference.left)) < len(queue.waiting):
            return self.change(engine_id, difference, now_ns)
        touched = self._drop(engine_id)
        engine = _EngineQueue(queue.interval_ns)
        if queue.waiting or queue.running:
            self._engines[engine_id] = engine
            self._fill(engine_id, engine, queue, now_ns, touched)
        self._changed(touched)
        return engine.digest

    def change(self, engine_id: int, change: QueueChange, now_ns: int) -> int:
        """Take a change of an engine's queue; returns the digest of what it is now."""
        engine = self._engines.setdefault(engine_id, _EngineQueue())
        engine.interval_ns = change.interval_ns or engine.interval_ns
        touched: Touched = {}
        for number in change.left:
            self._take_out(engine, number, touched)
        for running in change.running:
            self._take_out(engine, running.number, touched)
            self._run(engine, running, touched)
        for request in sorted(change.waiting):
            self._take_out(engine, request.rank[2], touched)
            self._put_in(engine_id, engine, request, now_ns, touched)
        self._changed(touched)
        return engine.digest

    def forget(self, engine_id: int) -> None:
        """Forget an engine and its requests."""
        self._changed(self._drop(engine_id))

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
        """Return where the session's first waiting turn stands; None if none waits."""
        places = self._places.get(key)
        return places[0] if places else None

    def place_of(self, key: SessionKey) -> QueuePlace:
        """Return where the first waiting turn of a session stands that is queued."""
        return self._places[key][0]

    def place_at(self, index: int) -> QueuePlace | None:
        """Return the place with `index` requests before it, if there is one: O(log requests)."""
        return self._order[index] if index < len(self._order) else None

    def between(self, one: QueuePlace | None, other: QueuePlace | None) -> Iterator[QueuePlace]:
        """Return the places from the one to the other, whichever is sooner; None is behind all."""
        bounds = sorted(place for place in (one, other) if place is not None)
        if not bounds:
            return iter(())
        return self._order.irange(bounds[0], bounds[1] if len(bounds) > 1 else None)

    def num_ahead(self, place: QueuePlace) -> int:
        """Count the requests before a place: O(log requests)."""
        return self._order.bisect_left(place)

    def starts_in_ns(self, place: QueuePlace) -> int:
        """Estimate when the request starts, by those before it at its engine; 0: unknown."""
        engine = self._engines[place.engine_id]
        return (engine.order.bisect_left(place.rank) + 1) * engine.interval_ns

    def runs(self, engine_id: int, number: int) -> bool:
        """Whether a request of an engine is being computed."""
        engine = self._engines.get(engine_id)
        return engine is not None and number in engine.running

    def holds(self, engine_id: int, number: int) -> bool:
        """Whether a request of an engine waits or runs."""
        engine = self._engines.get(engine_id)
        return engine is not None and (number in engine.places or number in engine.running)

    def num_waiting(self, engine_id: int) -> int:
        """Count the requests of an engine that wait."""
        engine = self._engines.get(engine_id)
        return len(engine.places) if engine else 0

    def num_running(self, engine_id: int) -> int:
        """Count the requests of an engine that are being computed."""
        engine = self._engines.get(engine_id)
        return len(engine.running) if engine else 0

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        assert list(self._order) == sorted(self._order)
        places = sorted(place for places in self._places.values() for place in places)
        assert places == list(self._order), "every request that waits has its place"
        num_running: dict[SessionKey, int] = {}
        for engine_id, engine in self._engines.items():
            own = [place for place in self._order if place.engine_id == engine_id]
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

    def _difference(self, engine_id: int, queue: QueueChange) -> QueueChange:
        """Return what `queue`, which is all of it, changes in what is known of an engine."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return queue
        places, running = engine.places, engine.running
        waiting = [
            request
            for request in queue.waiting
            if (place := places.get(request.rank[2])) is None
            or (place.rank, place.key) != request[:2]
        ]
        reported = {request.rank[2] for request in queue.waiting} | {
            request.number for request in queue.running
        }
        return QueueChange(
            waiting,
            [request for request in queue.running if running.get(request.number) != request.key],
            [number for number in (*places, *running) if number not in reported],
            queue.interval_ns,
        )

    def _fill(
        self,
        engine_id: int,
        engine: _EngineQueue,
        queue: QueueChange,
        now_ns: int,
        touched: Touched,
    ) -> None:
        """Take all requests of an engine that has none, in a sixth of the time of `_put_in`s."""
        ordered = sorted(queue.waiting)
        ranks, keys = [request[0] for request in ordered], [request[1] for request in ordered]
        starts_ns = count(now_ns + engine.interval_ns, engine.interval_ns)
        places = list(
            map(partial(tuple.__new__, QueuePlace), zip(starts_ns, repeat(engine_id), ranks, keys))
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
        for running in queue.running:
            self._run(engine, running, touched)

    def _drop(self, engine_id: int) -> Touched:
        """Forget an engine, and return whose requests it had."""
        touched: Touched = {}
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return touched
        for number in list(engine.running):
            self._take_out(engine, number, touched)
        if BULK_SHARE * len(engine.places) > len(self._order):
            self._order = SortedList(place for place in self._order if place.engine_id != engine_id)
        else:
            for place in engine.places.values():
                self._order.remove(place)
        for place in engine.places.values():
            self._vacate(place, touched)
        return touched

    # ------------------------------------------------------------------------- request by request

    def _put_in(
        self,
        engine_id: int,
        engine: _EngineQueue,
        request: QueuedRequest,
        now_ns: int,
        touched: Touched,
    ) -> None:
        order, places = engine.order, engine.places
        index = order.bisect_left(request.rank)
        starts_at_ns = now_ns + (index + 1) * engine.interval_ns
        if index:
            starts_at_ns = max(starts_at_ns, places[order[index - 1][2]].starts_at_ns)
        if index < len(order):
            starts_at_ns = min(starts_at_ns, places[order[index][2]].starts_at_ns)
        place = places[request.rank[2]] = QueuePlace(
            starts_at_ns, engine_id, request.rank, request.key
        )
        order.add(request.rank)
        engine.digest = combined(engine.digest, added=waiting_digest(request.rank, request.key))
        self._order.add(place)
        insort(self._places.setdefault(request.key, []), place)
        touched[request.key] = None

    def _run(self, engine: _EngineQueue, request: RunningRequest, touched: Touched) -> None:
        engine.running[request.number] = request.key
        engine.digest = combined(engine.digest, added=running_digest(request.number, request.key))
        self._num_running[request.key] = self._num_running.get(request.key, 0) + 1
        touched[request.key] = None

    def _take_out(self, engine: _EngineQueue, number: int, touched: Touched) -> None:
        """Forget a request, if it is known."""
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
