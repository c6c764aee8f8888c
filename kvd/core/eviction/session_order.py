"""Orders of sessions, by rank.

Pure. `SessionOrder` holds sessions in the order of any rank, for eviction or for reading ahead.
`RestingSessions` are those that recovery found and that have not been used since. `Guard` is the
first part of an eviction rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain, islice
from math import inf
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList

from shared.types.session_key import SessionKey

Rank = TypeVar("Rank", bound=tuple[object, ...])  # unique among the sessions of an order
EvictionRank = tuple[float, ...]  # the lowest is evicted first
MOST_CHANGED = 512  # sessions of a large order that one call places: about five milliseconds
BULK_SHARE = 8  # if more than 1/BULK_SHARE of the sessions have changed, sorting all is faster
RESTING_PAGE = 1024  # places counted together, to skip pages whose sessions have all woken


class Guard(IntEnum):
    """What protects a session from eviction while there are others. A higher one goes later."""

    NONE = 0
    RETAINED = 1  # its client wants it kept for a while
    PINNED = 2  # an operator has soft-pinned it


class SessionOrder(Generic[Rank]):
    """Some sessions in the order of their ranks. A change is O(1), each result O(log sessions).

    Sessions are placed when the order is read, not when they change. A session that changes ten
    times between two reads is moved once, and a whole queue that is reported at once is sorted at
    once. A read of a large order places only some of the changed sessions and skips the others:
    they come last, until later reads have placed them.

    Invariant: a session of the order has a place, with one rank, or waits to be placed.

    Args:
        rank_of: returns the current rank of a session of the order.
        most_at_once: an order of up to this many sessions is sorted as a whole by one read. In a
            larger one, a read places MOST_CHANGED sessions.
    """

    def __init__(self, rank_of: Callable[[SessionKey], Rank], most_at_once: float = inf) -> None:
        self._rank_of = rank_of
        self._most_at_once = most_at_once
        self._placed: SortedList[tuple[Any, ...]] = SortedList()  # (rank, key)
        self._ranks: dict[SessionKey, Rank | None] = {}  # None: not placed yet
        self._changed: dict[SessionKey, None] = {}  # to be placed, as far as they are in _ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._ranks

    def enter(self, key: SessionKey) -> None:
        """Add the session, if it is not in the order."""
        if self._ranks.setdefault(key) is None:
            self._changed[key] = None

    def change(self, keys: Mapping[SessionKey, None]) -> None:
        """Record that the ranks of sessions may have changed; ignore those not in the order."""
        if self._ranks:
            self._changed.update(keys)

    def put(self, keys: Mapping[SessionKey, None]) -> None:
        """Add sessions, or record that their ranks may have changed."""
        self._changed.update(keys)
        if len(keys) * BULK_SHARE > len(self._ranks):
            self._ranks = {**keys, **self._ranks}  # merging dicts reuses the hashes of the keys
        else:
            for key in keys:
                self._ranks.setdefault(key)

    def leave(self, key: SessionKey) -> None:
        """Remove the session, if it is in the order."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            self._placed.remove((rank, key))
        self._changed.pop(key, None)

    def rank(self, key: SessionKey) -> Rank | None:
        """Return the session's rank in this order; None if it is not in it."""
        if key in self._changed:
            self._place([key])
        return self._ranks.get(key)

    def settle_many(self) -> None:
        """Place changed sessions if they are many. Their ranks have to be up to date."""
        if len(self._changed) >= MOST_CHANGED:
            self._settle()

    def between(self, low: Rank, high: Rank) -> Iterator[SessionKey]:
        """Yield the sessions with ranks in [low, high), the lowest first."""
        return (key for _, key in self.ranked_between(low, high))

    def ranked_between(
        self, low: Rank | None = None, high: Rank | None = None
    ) -> Iterator[tuple[Rank, SessionKey]]:
        """Yield the sessions with ranks in [low, high), each with its rank. None: no bound."""
        return self._read(low, high, is_reversed=False)

    def downwards(self, low: Rank, high: Rank) -> Iterator[SessionKey]:
        """Yield the sessions with ranks in [low, high), the highest first."""
        return (key for _, key in self._read(low, high, is_reversed=True))

    def _read(
        self, low: Rank | None, high: Rank | None, *, is_reversed: bool
    ) -> Iterator[tuple[Rank, SessionKey]]:
        """Yield the sessions with ranks in [low, high); those not placed yet come last."""
        self._settle()
        least, most = None if low is None else (low,), None if high is None else (high,)
        found = self._placed.irange(least, most, reverse=is_reversed)
        if not self._changed:
            return found  # (rank,) sorts before every (rank, key)
        settled = (entry for entry in found if entry[1] not in self._changed)
        return chain(settled, self._unsettled(low, high, is_reversed=is_reversed))

    def _unsettled(
        self, low: Rank | None, high: Rank | None, *, is_reversed: bool
    ) -> Iterator[tuple[Rank, SessionKey]]:
        """Place the sessions that a read has skipped, and yield those between the bounds."""
        while self._changed:
            keys = [*islice(self._changed, MOST_CHANGED)]
            self._place(keys)
            entries = [(rank, key) for key in keys if (rank := self._ranks.get(key)) is not None]
            yield from (
                entry
                for entry in sorted(entries, reverse=is_reversed)
                if (low is None or entry[0] >= low) and (high is None or entry[0] < high)
            )

    def _settle(self) -> None:
        """Place the sessions that have changed: all of them, or some of many."""
        num_changed = len(self._changed)
        if num_changed * BULK_SHARE > len(self._ranks) <= self._most_at_once:
            self._ranks = {key: self._rank_of(key) for key in self._ranks}
            self._placed = SortedList((rank, key) for key, rank in self._ranks.items())
            self._changed.clear()
        elif num_changed:
            self._place([*islice(self._changed, MOST_CHANGED)])

    def _place(self, keys: Sequence[SessionKey]) -> None:
        """Place those of the sessions that have changed."""
        for key in keys:
            del self._changed[key]
            if key in self._ranks:
                before, rank = self._ranks[key], self._rank_of(key)
                if before != rank:
                    if before is not None:
                        self._placed.remove((before, key))
                    self._placed.add((rank, key))
                    self._ranks[key] = rank


class RestingSessions:
    """Sessions that recovery found of an earlier kvd, not used since.

    There may be a million of them, and most are not used for days. They come in order of eviction,
    so none of them needs a place in an order, or facts: the number of its last use follows from its
    position, and says everything. A session *wakes*, and is ranked by itself, as soon as anything
    happens to it. `wake` is O(1), finding a place in the order O(log sessions).

    Invariant: a session rests at most once, and never again after it woke.
    """

    def __init__(self) -> None:
        self._first_use = 0
        self._places: list[SessionKey | None] = []  # None: the session has woken
        self._num_resting: list[int] = []  # by page of RESTING_PAGE places
        self._uses: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._uses

    def restore(self, keys: Sequence[SessionKey], first_use: int) -> None:
        """Add sessions in order of eviction. `first_use` is the number of the first one's use."""
        assert not self._places, "sessions of an earlier kvd come once"
        self._first_use = first_use
        self._places = list(keys)
        self._uses = {key: use for use, key in enumerate(keys, first_use)}
        counts = range(len(keys), 0, -RESTING_PAGE)
        self._num_resting = [min(RESTING_PAGE, count) for count in counts]

    def use(self, key: SessionKey) -> int | None:
        """Return the number of the session's last use; None if it does not rest."""
        return self._uses.get(key)

    def wake(self, key: SessionKey) -> int | None:
        """Remove the session; return the number of its last use, None if it does not rest."""
        use = self._uses.pop(key, None)
        if use is not None:
            place = use - self._first_use
            self._places[place] = None
            self._num_resting[place // RESTING_PAGE] -= 1
        return use

    def between(
        self, low: EvictionRank, high: EvictionRank, rank_of: Callable[[int], EvictionRank]
    ) -> Iterator[tuple[EvictionRank, SessionKey]]:
        """Yield the sessions with ranks in [low, high), in order of eviction.

        Args:
            low: the lowest rank, included.
            high: the upper bound, excluded.
            rank_of: returns the rank of a resting session by the number of its last use. It grows
                with that number.
        """
        start, end = (self._bisect(bound, rank_of) for bound in (low, high))
        while start < end:
            page_end = (start // RESTING_PAGE + 1) * RESTING_PAGE
            if self._num_resting[start // RESTING_PAGE]:
                for place in range(start, min(page_end, end)):
                    key = self._places[place]
                    if key is not None:
                        yield rank_of(self._first_use + place), key
            start = page_end

    def _bisect(self, bound: EvictionRank, rank_of: Callable[[int], EvictionRank]) -> int:
        """Return the first place whose rank is not below the bound."""
        low, high = 0, len(self._places)
        while low < high:
            middle = (low + high) // 2
            if rank_of(self._first_use + middle) < bound:
                low = middle + 1
            else:
                high = middle
        return low
