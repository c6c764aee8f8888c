"""The queues of all engines merged into one: which sessions are needed, and how soon.

Pure. An engine reports its whole queue once, and then changes of it. Both are forgotten with the
engine. The queues are merged by the estimated start of each request. The estimate is made when the
request comes, and kept between the estimates of its neighbours, so that the requests of one engine
stay in that engine's order.

Invariants (`check`):
1. the merged order, and its restriction to each engine, are sorted;
2. a session is queued exactly while a request of it waits, and its place is that of its first one.

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
    running_digest,
    update_digest,
    waiting_digest,
    waiting_digests,
)
from shared.types.session_key import SessionKey

FEW_SHARE = 2  # changes fewer than 1/FEW_SHARE of the requests are applied one by one
BULK_SHARE = 8  # an engine with more than 1/BULK_SHARE of all requests is removed by a full pass

Touched = dict[SessionKey, None]  # sessions whose requests have changed, in order


class QueuePlace(NamedTuple):
    """The place of a request among those of all engines. A lower one starts sooner."""

    starts_at_ns: int  # an estimate
    engine_id: int
    rank: Rank
    key: SessionKey


@dataclass(slots=True)
class _EngineQueue:
    """One engine's requests.

    Attributes:
        interval_ns: mean time between the starts of two requests, as reported; 0: not known.
        digest: digest of all its requests, which the engine compares with its own.
        order: ranks of the waiting requests.
        places: places of the waiting requests, by number.
        running: sessions of the running requests, by number.
    """

    interval_ns: int = 0
    digest: int = 0
    order: "SortedList[Rank]" = field(default_factory=SortedList)
    places: dict[int, QueuePlace] = field(default_factory=dict)
    running: dict[int, SessionKey] = field(default_factory=dict)


class QueueWindow:
    """The merged queue. Each change costs O(log requests).

    Args:
        on_change: called after each change, with the sessions that may have another place, or may
            have begun or ceased to run.
    """

    def __init__(self, on_change: Callable[[Touched], None]) -> None:
        self._on_change = on_change
        self._engines: dict[int, _EngineQueue] = {}
        self._order: SortedList[QueuePlace] = SortedList()
        self._places: dict[SessionKey, list[QueuePlace]] = {}  # sorted
        self._num_running: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._order)

    def __iter__(self) -> Iterator[SessionKey]:
        """Iterate over the sessions of waiting requests, soonest first. One may come twice."""
        return (place.key for place in self._order)

    # ------------------------------------------------------------------------------------ changing

    def replace(self, engine_id: int, queue: QueueChange, now_ns: int) -> int:
        """Replace an engine's queue; return its digest. O(requests).

        Only the difference is applied, unless most of the queue is new: then all is sorted at once.
        """
        difference = self._difference(engine_id, queue)
        if FEW_SHARE * (len(difference.waiting) + len(difference.left)) < len(queue.waiting):
            return self.change(engine_id, difference, now_ns)
        touched = self._drop(engine_id)
        engine = _EngineQueue(queue.interval_ns)
        if queue.waiting or queue.running:
            self._engines[engine_id] = engine
            self._fill(engine_id, engine, queue, now_ns, touched)
        self._on_change(touched)
        return engine.digest

    def change(self, engine_id: int, change: QueueChange, now_ns: int) -> int:
        """Apply a change of an engine's queue; return the digest of the result."""
        engine = self._engines.setdefault(engine_id, _EngineQueue())
        engine.interval_ns = change.interval_ns or engine.interval_ns
        touched: Touched = {}
        for number in change.left:
            self._remove(engine, number, touched)
        for running in change.running:
            self._remove(engine, running.number, touched)
            self._add_running(engine, running, touched)
        for request in sorted(change.waiting):
            self._remove(engine, request.rank[2], touched)
            self._insert(engine_id, engine, request, now_ns, touched)
        self._on_change(touched)
        return engine.digest

    def forget(self, engine_id: int) -> None:
        """Forget an engine and its requests."""
        self._on_change(self._drop(engine_id))

    # ------------------------------------------------------------------------------------- queries

    @property
    def num_sessions_running(self) -> int:
        """Number of sessions with a running turn."""
        return len(self._num_running)

    def is_queued(self, key: SessionKey) -> bool:
        """Whether a turn of the session waits at any engine."""
        return key in self._places

    def not_queued(self, keys: Touched) -> list[SessionKey]:
        """Return those of the sessions that have no waiting turn at any engine."""
        places = self._places
        return [key for key in keys if key not in places]

    def is_running(self, key: SessionKey) -> bool:
        """Whether a turn of the session runs at any engine."""
        return key in self._num_running

    def place(self, key: SessionKey) -> QueuePlace | None:
        """Return the place of the session's first waiting turn; None if none waits."""
        places = self._places.get(key)
        return places[0] if places else None

    def place_of(self, key: SessionKey) -> QueuePlace:
        """Return the place of the first waiting turn of a queued session."""
        return self._places[key][0]

    def place_at(self, index: int) -> QueuePlace | None:
        """Return the place that has `index` requests before it; None if there is none.

        O(log requests).
        """
        return self._order[index] if index < len(self._order) else None

    def between(self, first: QueuePlace | None, second: QueuePlace | None) -> Iterator[QueuePlace]:
        """Yield the places from the sooner of two places to the later; None is after all places."""
        bounds = sorted(place for place in (first, second) if place is not None)
        if not bounds:
            return iter(())
        return self._order.irange(bounds[0], bounds[1] if len(bounds) > 1 else None)

    def num_ahead(self, place: QueuePlace) -> int:
        """Return the number of requests before a place: O(log requests)."""
        return self._order.bisect_left(place)

    def starts_in_ns(self, place: QueuePlace) -> int:
        """Estimate the time to a request's start from those before it at its engine; 0: unknown."""
        engine = self._engines[place.engine_id]
        return (engine.order.bisect_left(place.rank) + 1) * engine.interval_ns

    def runs(self, engine_id: int, number: int) -> bool:
        """Whether a request of an engine runs."""
        engine = self._engines.get(engine_id)
        return engine is not None and number in engine.running

    def holds(self, engine_id: int, number: int) -> bool:
        """Whether a request of an engine waits or runs."""
        engine = self._engines.get(engine_id)
        return engine is not None and (number in engine.places or number in engine.running)

    def num_waiting(self, engine_id: int) -> int:
        """Return the number of waiting requests of an engine."""
        engine = self._engines.get(engine_id)
        return len(engine.places) if engine else 0

    def num_running(self, engine_id: int) -> int:
        """Return the number of running requests of an engine."""
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
                digest = update_digest(digest, added=waiting_digest(place.rank, place.key))
            for number, key in engine.running.items():
                digest = update_digest(digest, added=running_digest(number, key))
            assert digest == engine.digest
        assert num_running == self._num_running

    # ------------------------------------------------------------------------------- whole queues

    def _difference(self, engine_id: int, queue: QueueChange) -> QueueChange:
        """Return what `queue`, a whole queue, changes in the known queue of an engine."""
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
        """Add all requests of an engine that has none, in a sixth of the time of `_insert`s."""
        ordered = sorted(queue.waiting)
        ranks, keys = [request[0] for request in ordered], [request[1] for request in ordered]
        starts_ns = count(now_ns + engine.interval_ns, engine.interval_ns)
        places = list(
            map(partial(tuple.__new__, QueuePlace), zip(starts_ns, repeat(engine_id), ranks, keys))
        )
        engine.places = {rank[2]: place for rank, place in zip(ranks, places, strict=True)}
        engine.order = SortedList(ranks)
        engine.digest = update_digest(
            engine.digest, added=waiting_digests(zip(ranks, keys, strict=True))
        )
        self._order.update(places)
        only = dict(zip(keys, map(list, zip(places, strict=True)), strict=True))
        touched.update(dict.fromkeys(only))
        if len(only) == len(keys) and self._places.keys().isdisjoint(only):
            self._places.update(only)
        else:  # some sessions have more than one waiting request
            for place in places:
                insort(self._places.setdefault(place.key, []), place)
        for running in queue.running:
            self._add_running(engine, running, touched)

    def _drop(self, engine_id: int) -> Touched:
        """Remove an engine; return the sessions whose requests it had."""
        touched: Touched = {}
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return touched
        for number in list(engine.running):
            self._remove(engine, number, touched)
        if BULK_SHARE * len(engine.places) > len(self._order):
            self._order = SortedList(place for place in self._order if place.engine_id != engine_id)
        else:
            for place in engine.places.values():
                self._order.remove(place)
        for place in engine.places.values():
            self._vacate(place, touched)
        return touched

    # ---------------------------------------------------------------------------- single requests

    def _insert(
        self,
        engine_id: int,
        engine: _EngineQueue,
        request: QueuedRequest,
        now_ns: int,
        touched: Touched,
    ) -> None:
        """Add a waiting request, with an estimated start between those of its neighbours."""
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
        engine.digest = update_digest(
            engine.digest, added=waiting_digest(request.rank, request.key)
        )
        self._order.add(place)
        insort(self._places.setdefault(request.key, []), place)
        touched[request.key] = None

    def _add_running(self, engine: _EngineQueue, request: RunningRequest, touched: Touched) -> None:
        engine.running[request.number] = request.key
        engine.digest = update_digest(
            engine.digest, added=running_digest(request.number, request.key)
        )
        self._num_running[request.key] = self._num_running.get(request.key, 0) + 1
        touched[request.key] = None

    def _remove(self, engine: _EngineQueue, number: int, touched: Touched) -> None:
        """Remove a request, if it is known."""
        place = engine.places.pop(number, None)
        if place is not None:
            engine.digest = update_digest(
                engine.digest, removed=waiting_digest(place.rank, place.key)
            )
            engine.order.remove(place.rank)
            self._order.remove(place)
            self._vacate(place, touched)
        key = engine.running.pop(number, None)
        if key is not None:
            engine.digest = update_digest(engine.digest, removed=running_digest(number, key))
            self._num_running[key] -= 1
            if not self._num_running[key]:
                del self._num_running[key]
            touched[key] = None

    def _vacate(self, place: QueuePlace, touched: Touched) -> None:
        """Remove a place from those of its session."""
        places = self._places[place.key]
        del places[bisect_left(places, place)]
        if not places:
            del self._places[place.key]
        touched[place.key] = None
