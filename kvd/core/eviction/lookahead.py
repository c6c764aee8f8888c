"""Policy `lookahead`: the paper's look-ahead eviction, to the letter. Pure."""

from collections.abc import Iterator

from sortedcontainers import SortedList

from kvd.core.eviction.lookahead_queue import LookaheadQueuePolicy
from kvd.core.eviction.policy import PolicyContext
from kvd.core.eviction.queue_window import QueuePlace
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey


class LookaheadPolicy(LookaheadQueuePolicy):
    """Sessions in the eviction window go last, tail of the window first; others go by last use.

    The window is of `L_ew = (C_mem + C_disk) / S_kv` jobs. Its edge is moved when victims are asked
    for: by a session or so for each job that joined or left since, O(log jobs) each.

    *Source:* CachedAttention §3.3.2 (the order outside the window is not stated there).
    """

    name = "lookahead"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._window = context.eviction_window
        self._places: dict[SessionKey, QueuePlace] = {}
        self._inside: SortedList[QueuePlace] = SortedList()
        self._outside: SortedList[QueuePlace] = SortedList()  # none is before one inside
        self._moved: dict[SessionKey, QueuePlace | None] = {}  # since victims were asked for

    def engaged(
        self, key: SessionKey, place: QueuePlace | None, now_ns: int, *, is_running: bool
    ) -> None:
        """See EvictionPolicy."""
        super().engaged(key, place, now_ns, is_running=is_running)
        if place is None and key not in self._places:
            self._moved.pop(key, None)  # it came and went between two looks
        else:
            self._moved[key] = place

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,
        *,
        colder_than: SessionKey | None = None,
        clean: bool = False,
    ) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        self._settle()
        self._move_edge(self._window())
        return super().victims(tier, now_ns, colder_than=colder_than, clean=clean)

    def _place_of(self, key: SessionKey) -> QueuePlace | None:
        place = self._places.get(key)
        return place if place is not None and self._side_of(place) is self._inside else None

    def _side_of(self, place: QueuePlace) -> "SortedList[QueuePlace]":
        return self._inside if self._inside and place <= self._inside[-1] else self._outside

    def _settle(self) -> None:
        """Give every session that moved its place."""
        for key in self._moved:
            old = self._places.pop(key, None)
            if old is not None:
                self._side_of(old).remove(old)
        moved = {key: place for key, place in self._moved.items() if place is not None}
        self._places.update(moved)
        inside = {p for p in moved.values() if self._side_of(p) is self._inside}
        self._inside.update(inside)
        self._outside.update(p for p in moved.values() if p not in inside)
        self._moved.clear()

    def _move_edge(self, num_jobs: int) -> None:
        while self._inside and self._queue.num_ahead(self._inside[-1]) >= num_jobs:
            place = self._inside.pop()
            self._outside.add(place)
            self._changed(place.key)
        while self._outside and self._queue.num_ahead(self._outside[0]) < num_jobs:
            place = self._outside.pop(0)
            self._inside.add(place)
            self._changed(place.key)
