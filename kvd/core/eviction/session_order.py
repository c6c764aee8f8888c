"""Orders of sessions, from the one to be evicted first on.

Pure. `SessionOrder` holds sessions by whatever ranks them (also those that are to be read ahead);
`RestingSessions` are those that a start found and nobody has used since. `Guard` is what a rank may
begin with.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import chain, islice
from math import inf
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedList

from shared.types.session_key import SessionKey

Rank = TypeVar("Rank", bound=tuple[object, ...])  # no two sessions of an order have the same
EvictionRank = tuple[float, ...]  # the lowest goes first
MOST_CHANGED = 512  # sessions of a large order that one call places: some five milliseconds
BULK_SHARE = 8  # with more than one of so many sessions to be moved, sorting all is faster
RESTING_PAGE = 1024  # places whose sessions are counted together, to pass over those that woke


class Guard(IntEnum):
    """What keeps a session from going while there are others: more of it goes later."""

    NONE = 0
    RETAINED = 1  # its client wants it to be kept for a while
    PINNED = 2  # an operator does


class SessionOrder(Generic[Rank]):
    """Some sessions by their rank. Changes are O(1), a look O(log sessions) for each.

    Places are looked up when the order is asked, not when something changes: a session that changes
    ten times between two looks is moved once, and a whole queue that is reported at once is sorted
    at once. A look at a large order places some sessions only, and passes over the others that have
    changed: they come last, until later looks have placed them.

    Invariant: a session is in the order, with one rank, or waits to be placed; never neither.

    Args:
        rank_of: of a session of the order, now.
        most_at_once: sessions of an order that is sorted as a whole by one look, however large it
            is; beyond it MOST_CHANGED are placed.
    """

    def __init__(self, rank_of: Callable[[SessionKey], Rank], most_at_once: float = inf) -> None:
        self._rank_of = rank_of
        self._most_at_once = most_at_once
        self._placed: SortedList[tuple[Any, ...]] = SortedList()  # (rank, key)
        self._ranks: dict[SessionKey, Rank | None] = {}  # None: not placed yet
        self._changed: dict[SessionKey, None] = {}  # others among them, which are passed over

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._ranks

    def enter(self, key: SessionKey) -> None:
        """Take the session in, if it is not there yet."""
        if self._ranks.setdefault(key) is None:
            self._changed[key] = None

    def change(self, keys: Mapping[SessionKey, None]) -> None:
        """Record that sessions, as far as they are in the order, may have other ranks."""
        if self._ranks:
            self._changed.update(keys)

    def put(self, keys: Mapping[SessionKey, None]) -> None:
        """Take sessions in, or note that they may have other ranks."""
        self._changed.update(keys)
        if len(keys) * BULK_SHARE > len(self._ranks):
            self._ranks = {**keys, **self._ranks}  # no key is hashed again
        else:
            for key in keys:
                self._ranks.setdefault(key)

    def leave(self, key: SessionKey) -> None:
        """Take the session out, if it is there."""
        rank = self._ranks.pop(key, None)
        if rank is not None:
            self._placed.remove((rank, key))
        self._changed.pop(key, None)

    def rank(self, key: SessionKey) -> Rank | None:
        """Look up the session's rank in this order; None: it is not there."""
        if key in self._changed:
            self._place([key])
        return self._ranks.get(key)

    def settle_many(self) -> None:
        """Give sessions their places if many have changed; what ranks them is known now."""
        if len(self._changed) >= MOST_CHANGED:
            self._settle()

    def between(self, low: Rank, high: Rank) -> Iterator[SessionKey]:
        """Return the sessions of at least the one rank and below the other, the lowest first."""
        return (key for _, key in self.ranked_between(low, high))

    def ranked_between(
        self, low: Rank | None = None, high: Rank | None = None
    ) -> Iterator[tuple[Rank, SessionKey]]:
        """The same, each with its rank; None: without a bound."""
        return self._look(low, high, is_reversed=False)

    def downwards(self, low: Rank, high: Rank) -> Iterator[SessionKey]:
        """The same, in reverse order."""
        return (key for _, key in self._look(low, high, is_reversed=True))

    def _look(
        self, low: Rank | None, high: Rank | None, *, is_reversed: bool
    ) -> Iterator[tuple[Rank, SessionKey]]:
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
        """Place sessions that a look has passed over, and yield those between the bounds."""
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
        """Give sessions that changed their places: all of them, or some of many."""
        num_changed = len(self._changed)
        if num_changed * BULK_SHARE > len(self._ranks) <= self._most_at_once:
            self._ranks = {key: self._rank_of(key) for key in self._ranks}
            self._placed = SortedList((rank, key) for key, rank in self._ranks.items())
            self._changed.clear()
        elif num_changed:
            self._place([*islice(self._changed, MOST_CHANGED)])

    def _place(self, keys: Sequence[SessionKey]) -> None:
        """Give sessions their places that have changed; those of others stay as they are."""
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
    """What a start found of an earlier kvd and nobody has used since.

    There may be a million such sessions, most of which are not used for days. They are in order as
    they come, so none of them needs a place of its own in an order, or facts: a use that follows
    from where it stands says all. A session wakes, and is ranked by itself, as soon as anything
    happens to it. `wake` is O(1), finding a place in the order O(log sessions).

    Invariant: a session rests at most once, and never again after it woke.
    """

    def __init__(self) -> None:
        self._first_use = 0
        self._places: list[SessionKey | None] = []  # None: it woke
        self._num_resting: list[int] = []  # by page
        self._uses: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._uses

    def restore(self, keys: Sequence[SessionKey], first_use: int) -> None:
        """Begin with sessions in order of eviction; `first_use` is the use of the first one."""
        assert not self._places, "sessions of an earlier kvd come once"
        self._first_use = first_use
        self._places = list(keys)
        self._uses = {key: use for use, key in enumerate(keys, first_use)}
        counts = range(len(keys), 0, -RESTING_PAGE)
        self._num_resting = [min(RESTING_PAGE, count) for count in counts]

    def use(self, key: SessionKey) -> int | None:
        """Number of the session's last use; None: it does not rest."""
        return self._uses.get(key)

    def wake(self, key: SessionKey) -> int | None:
        """Take the session out; returns as `use`."""
        use = self._uses.pop(key, None)
        if use is not None:
            place = use - self._first_use
            self._places[place] = None
            self._num_resting[place // RESTING_PAGE] -= 1
        return use

    def between(
        self, low: EvictionRank, high: EvictionRank, rank_of: Callable[[int], EvictionRank]
    ) -> Iterator[tuple[EvictionRank, SessionKey]]:
        """Yield the sessions of at least the one rank and below the other, in order of eviction.

        Args:
            low: the lowest rank, included.
            high: the bound above, excluded.
            rank_of: of a session at rest by its last use: the later the higher.
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
        """Return the first place that is not below the bound."""
        low, high = 0, len(self._places)
        while low < high:
            middle = (low + high) // 2
            if rank_of(self._first_use + middle) < bound:
                low = middle + 1
            else:
                high = middle
        return low
