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
from itertools import compress, count, filterfalse, repeat

from sortedcontainers import SortedList

from shared.types.queue_delta import (
    QueueChange,
    QueuedRequest,
    QueuedRequests,
    Rank,
    RunningRequest,
    running_digest,
    update_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey

FEW_SHARE = 2  # changes fewer than 1/FEW_SHARE of the requests are applied one by one
BULK_SHARE = 8  # an engine with more than 1/BULK_SHARE of all requests is removed by a full pass

Touched = dict[SessionKey, None]  # sessions whose requests have changed, in order
# The place of a request among those of all engines: its estimated start in nanoseconds, its engine,
# rank and session. A lower one starts sooner. (A NamedTuple takes three times as long to make.)
QueuePlace = tuple[int, int, Rank, SessionKey]


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
            have begun or ceased to run, and those of them that have no waiting turn.
    """

    def __init__(self, on_change: Callable[[Touched, list[SessionKey]], None]) -> None:
        self._on_change = on_change
        self._engines: dict[int, _EngineQueue] = {}
        self._order: SortedList[QueuePlace] = SortedList()
        self._places: dict[SessionKey, QueuePlace] = {}  # of their first waiting requests
        self._later: dict[SessionKey, list[QueuePlace]] = {}  # of their others, sorted
        self._num_running: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._order)

    def __iter__(self) -> Iterator[SessionKey]:
        """Iterate over the sessions of waiting requests, soonest first. One may come twice."""
        return (key for _, _, _, key in self._order)

    # ------------------------------------------------------------------------------------ changing

    def replace(self, engine_id: int, queue: QueueChange, now_ns: int) -> int:
        """Replace an engine's queue; return its digest. O(requests).

        Only the difference is applied, unless most of the queue is new: then all is sorted at once.
        """
        difference = self._difference(engine_id, queue)
        if FEW_SHARE * (len(difference.waiting) + len(difference.left)) < len(queue.waiting):
            return self.change(engine_id, difference, now_ns)
        dropped, running = self._drop(engine_id), Touched()
        engine, waiting = self._fill(engine_id, queue, now_ns)
        for request in queue.running:
            self._add_running(engine, request, running)
        if queue.waiting or queue.running:
            self._engines[engine_id] = engine
        unqueued = self._not_queued({**dropped, **running})
        self._on_change({**dropped, **waiting, **running}, unqueued)
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
        self._on_change(touched, self._not_queued(touched))
        return engine.digest

    def forget(self, engine_id: int) -> None:
        """Forget an engine and its requests."""
        touched = self._drop(engine_id)
        self._on_change(touched, self._not_queued(touched))

    # ------------------------------------------------------------------------------------- queries

    @property
    def num_sessions_running(self) -> int:
        """Number of sessions with a running turn."""
        return len(self._num_running)

    def is_queued(self, key: SessionKey) -> bool:
        """Whether a turn of the session waits at any engine."""
        return key in self._places

    def is_running(self, key: SessionKey) -> bool:
        """Whether a turn of the session runs at any engine."""
        return key in self._num_running

    def place(self, key: SessionKey) -> QueuePlace | None:
        """Return the place of the session's first waiting turn; None if none waits."""
        return self._places.get(key)

    def place_of(self, key: SessionKey) -> QueuePlace:
        """Return the place of the first waiting turn of a queued session."""
        return self._places[key]

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
        _, engine_id, rank, _ = place
        engine = self._engines[engine_id]
        return (engine.order.bisect_left(rank) + 1) * engine.interval_ns

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
        assert self._later.keys() <= self._places.keys()
        assert all(self._later.values())
        queued: dict[SessionKey, list[QueuePlace]] = {}
        for place in self._order:
            queued.setdefault(place[3], []).append(place)
        assert queued == {
            key: [place, *self._later.get(key, ())] for key, place in self._places.items()
        }, "every request that waits has its place"
        num_running: dict[SessionKey, int] = {}
        for engine_id, engine in self._engines.items():
            own = [place for place in self._order if place[1] == engine_id]
            assert [rank for _, _, rank, _ in own] == list(engine.order) == sorted(engine.order)
            assert {place[2][2]: place for place in own} == engine.places
            assert not engine.places.keys() & engine.running.keys()
            for key in engine.running.values():
                num_running[key] = num_running.get(key, 0) + 1
            digest = 0
            for _, _, rank, key in own:
                digest = update_digest(digest, added=waiting_digest(rank, key))
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
        running, waiting, numbers = engine.running, queue.waiting, queue.waiting.numbers
        known = map(engine.places.get, numbers)
        are_new = [
            place is None or place[2:] != (rank, key)
            for place, rank, key in zip(known, waiting.ranks, waiting.keys, strict=True)
        ]
        reported = {*numbers, *(request.number for request in queue.running)}
        return QueueChange(
            QueuedRequests(
                list(compress(waiting.ranks, are_new)),
                list(compress(waiting.keys, are_new)),
                list(compress(waiting.history_tokens, are_new)),
            ),
            [request for request in queue.running if running.get(request.number) != request.key],
            [number for number in (*engine.places, *running) if number not in reported],
            queue.interval_ns,
        )

    def _fill(
        self, engine_id: int, queue: QueueChange, now_ns: int
    ) -> tuple[_EngineQueue, Touched]:
        """Add all waiting requests of an unknown engine, in a tenth of the time of `_insert`s.

        Returns:
            The engine, and the sessions of the requests.
        """
        waiting, engine = queue.waiting, _EngineQueue(queue.interval_ns)
        engine.order = SortedList(waiting.ranks)
        ranks, keys = list(engine.order), waiting.keys
        if ranks != waiting.ranks:  # engines report their requests in order
            keys = list(map(dict(zip(waiting.ranks, keys, strict=True)).__getitem__, ranks))
        starts_ns = count(now_ns + engine.interval_ns, engine.interval_ns)
        places = list(zip(starts_ns, repeat(engine_id), ranks, keys))
        engine.places = {rank[2]: place for rank, place in zip(ranks, places, strict=True)}
        digest = waiting.digest or sum(map(waiting_digest, ranks, keys))
        engine.digest = update_digest(0, added=digest)
        self._order.update(places)
        first = dict(zip(keys, places, strict=True))
        if len(first) == len(keys) and self._places.keys().isdisjoint(first.keys()):
            self._places.update(first)
        else:  # some sessions have more than one waiting request
            for place in places:
                self._occupy(place)
        return engine, dict.fromkeys(first)

    def _drop(self, engine_id: int) -> Touched:
        """Remove an engine; return the sessions whose requests it had."""
        touched: Touched = {}
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return touched
        for number in list(engine.running):
            self._remove(engine, number, touched)
        if BULK_SHARE * len(engine.places) > len(self._order):
            self._order = SortedList(place for place in self._order if place[1] != engine_id)
        else:
            for place in engine.places.values():
                self._order.remove(place)
        for place in engine.places.values():
            self._vacate(place, touched)
        return touched

    def _not_queued(self, keys: Touched) -> list[SessionKey]:
        """Return those of the sessions that have no waiting turn at any engine."""
        return list(filterfalse(self._places.__contains__, keys))

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
            starts_at_ns = max(starts_at_ns, places[order[index - 1][2]][0])
        if index < len(order):
            starts_at_ns = min(starts_at_ns, places[order[index][2]][0])
        place = (starts_at_ns, engine_id, request.rank, request.key)
        places[request.rank[2]] = place
        order.add(request.rank)
        engine.digest = update_digest(
            engine.digest, added=waiting_digest(request.rank, request.key)
        )
        self._order.add(place)
        self._occupy(place)
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
            _, _, rank, key = place
            engine.digest = update_digest(engine.digest, removed=waiting_digest(rank, key))
            engine.order.remove(rank)
            self._order.remove(place)
            self._vacate(place, touched)
        running = engine.running.pop(number, None)
        if running is not None:
            engine.digest = update_digest(engine.digest, removed=running_digest(number, running))
            self._num_running[running] -= 1
            if not self._num_running[running]:
                del self._num_running[running]
            touched[running] = None

    def _occupy(self, place: QueuePlace) -> None:
        """Add a place to those of its session."""
        key = place[3]
        first = self._places.setdefault(key, place)
        if first is not place:
            self._places[key] = min(first, place)
            insort(self._later.setdefault(key, []), max(first, place))

    def _vacate(self, place: QueuePlace, touched: Touched) -> None:
        """Remove a place from those of its session."""
        key = place[3]
        later = self._later.get(key, [])
        if self._places[key] != place:
            del later[bisect_left(later, place)]
        elif later:
            self._places[key] = later.pop(0)
        else:
            del self._places[key]
        if not later:
            self._later.pop(key, None)
        touched[key] = None
