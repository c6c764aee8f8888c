"""LruOrder: sessions in the order of their last use, for the quotas of tenants. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import chain, pairwise
from typing import Any

from sortedcontainers import SortedList

from kvd.core.eviction.session_order import Guard
from shared.types.session_key import SessionKey

LRU_PAGE = 1 << 16  # sessions per dict: one of a million takes 0.1 s to grow, within one call


class LruOrder:
    """Sessions, least recently used first. *Guarded* ones come after all others.

    A session that comes, or is used, without a guard goes into a page: O(1). While it has a guard,
    and after that until its next use, it has a place by its last use: O(log sessions with a place).
    The time of a call is bounded, however many sessions there are: beyond LRU_PAGE of them, each
    page is searched for the session.

    Invariant: a session is in a page or has a place, never both. A guarded session has a place.
    """

    def __init__(self) -> None:
        self._pages = _PagedOrder()
        self._placed: SortedList[tuple[Any, ...]] = SortedList()  # the values of _places
        self._places: dict[SessionKey, tuple[Guard, int, SessionKey]] = {}
        self._guards: dict[SessionKey, Guard] = {}  # of guarded sessions, in the order or not
        self._newest_use = 0
        self._oldest_use = 0

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._places or self._pages.use(key) is not None

    def __iter__(self) -> Iterator[SessionKey]:
        unguarded = self._placed.irange(maximum=(Guard.RETAINED,), inclusive=(True, False))
        by_use = merge(self._pages, ((use, key) for _, use, key in unguarded))
        guarded = self._placed.irange(minimum=(Guard.RETAINED,))
        return chain((key for _, key in by_use), (key for _, _, key in guarded))

    def touch(self, key: SessionKey) -> None:
        """Put the session after all others with its guard."""
        self._take(key)
        self._newest_use += 1
        if key in self._guards:
            self._place(key, self._newest_use)
        else:
            self._pages.append(key, self._newest_use)

    def enter(self, key: SessionKey) -> None:
        """Put the session after all others with its guard, unless it is in the order."""
        if key not in self:
            self.touch(key)

    def enter_before(self, key: SessionKey) -> None:
        """Put the session before all others with its guard, unless it is in the order."""
        if key in self:
            return
        self._oldest_use -= 1
        if key in self._guards:
            self._place(key, self._oldest_use)
        else:
            self._pages.prepend(key, self._oldest_use)

    def end(self, key: SessionKey) -> None:
        """Move the session before all others with its guard, if it is in the order."""
        if self._take(key) is not None:
            self.enter_before(key)

    def guard(self, key: SessionKey, guard: Guard) -> None:
        """Set the session's guard. The end of a pin counts as a use."""
        previous = self._guards.pop(key, Guard.NONE)
        if guard:
            self._guards[key] = guard
        use = self._take(key)
        if use is None:
            return
        if guard < previous is Guard.PINNED:
            self.touch(key)
        else:
            self._place(key, use)

    def remove(self, key: SessionKey) -> None:
        """Remove the session, and its guard."""
        self._take(key)
        self._guards.pop(key, None)

    def _place(self, key: SessionKey, use: int) -> None:
        place = self._places[key] = (self._guards.get(key, Guard.NONE), use, key)
        self._placed.add(place)

    def _take(self, key: SessionKey) -> int | None:
        """Remove the session's place; return its last use, None if it has none."""
        place = self._places.pop(key, None)
        if place is None:
            return self._pages.remove(key)
        self._placed.remove(place)
        return place[1]


class _PagedOrder:
    """Sessions with the numbers of their uses, in ascending order, page by page."""

    def __init__(self) -> None:
        self._pages: list[OrderedDict[SessionKey, int]] = [OrderedDict()]

    def __iter__(self) -> Iterator[tuple[int, SessionKey]]:
        return ((use, key) for page in self._pages for key, use in page.items())

    def use(self, key: SessionKey) -> int | None:
        """Return the number of the session's use; None if it is not in a page."""
        return next((page[key] for page in self._pages if key in page), None)

    def append(self, key: SessionKey, use: int) -> None:
        """Add a new session after all others."""
        if len(self._pages[-1]) >= LRU_PAGE:
            self._join_two()
            self._pages.append(OrderedDict())
        self._pages[-1][key] = use

    def prepend(self, key: SessionKey, use: int) -> None:
        """Add a new session before all others."""
        if len(self._pages[0]) >= LRU_PAGE:
            self._join_two()
            self._pages.insert(0, OrderedDict())
        self._pages[0][key] = use
        self._pages[0].move_to_end(key, last=False)

    def remove(self, key: SessionKey) -> int | None:
        """Remove a session; return the number of its use, None if it was not in a page."""
        for index, page in enumerate(self._pages):
            if key in page:
                use = page.pop(key)
                if not page and len(self._pages) > 1:
                    del self._pages[index]
                return use
        return None

    def _join_two(self) -> None:
        """Join two neighbouring pages that hold little, before a page is added."""
        for index, (page, next_page) in enumerate(pairwise(self._pages)):
            if len(page) + len(next_page) <= LRU_PAGE // 2:
                self._pages[index : index + 2] = [OrderedDict(page | next_page)]
                return
