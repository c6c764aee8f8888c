"""LruOrder: sessions by their last use alone, for the quotas of tenants. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge
from itertools import chain, pairwise
from typing import Any

from sortedcontainers import SortedList

from kvd.core.eviction.session_order import Guard
from shared.types.session_key import SessionKey

LRU_PAGE = 1 << 16  # sessions in one table: one of a million takes a tenth of a second to grow


class LruOrder:
    """Sessions, least recently used first; *guarded* ones come after all the others.

    A session is in a page, O(1), as long as it comes or is used without a guard. With one, and
    after it, it has a place by its last use, O(log sessions that have one). A call takes a bounded
    time, however many sessions there are: of more than LRU_PAGE, each of their pages is asked for
    the session.

    Invariant: a session is in a page or has a place, never both; one that is guarded has a place.
    """

    def __init__(self) -> None:
        self._pages = _PagedOrder()
        self._placed: SortedList[tuple[Any, ...]] = SortedList()  # the values of _places
        self._places: dict[SessionKey, tuple[Guard, int, SessionKey]] = {}
        self._guards: dict[SessionKey, Guard] = {}  # of those that have one, in the order or not
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
        """Put the session behind all others that are guarded as it is."""
        self._take(key)
        self._newest_use += 1
        if key in self._guards:
            self._place(key, self._newest_use)
        else:
            self._pages.append(key, self._newest_use)

    def enter(self, key: SessionKey) -> None:
        """Do so, unless it is in the order."""
        if key not in self:
            self.touch(key)

    def enter_before(self, key: SessionKey) -> None:
        """Put the session before all others that are guarded as it is, unless it is in order."""
        if key in self:
            return
        self._oldest_use -= 1
        if key in self._guards:
            self._place(key, self._oldest_use)
        else:
            self._pages.prepend(key, self._oldest_use)

    def end(self, key: SessionKey) -> None:
        """Move the session before the others, if it is in the order."""
        if self._take(key) is not None:
            self.enter_before(key)

    def guard(self, key: SessionKey, guard: Guard) -> None:
        """Guard the session so from now on. That it is pinned no more counts as a use."""
        was = self._guards.pop(key, Guard.NONE)
        if guard:
            self._guards[key] = guard
        use = self._take(key)
        if use is None:
            return
        if guard < was is Guard.PINNED:
            self.touch(key)
        else:
            self._place(key, use)

    def remove(self, key: SessionKey) -> None:
        """Forget the session."""
        self._take(key)
        self._guards.pop(key, None)

    def _place(self, key: SessionKey, use: int) -> None:
        place = self._places[key] = (self._guards.get(key, Guard.NONE), use, key)
        self._placed.add(place)

    def _take(self, key: SessionKey) -> int | None:
        """Take the session out; returns its last use, None if it was not there."""
        place = self._places.pop(key, None)
        if place is None:
            return self._pages.remove(key)
        self._placed.remove(place)
        return place[1]


class _PagedOrder:
    """Sessions and their uses, page by page: the later one is used, the farther behind it is."""

    def __init__(self) -> None:
        self._pages: list[OrderedDict[SessionKey, int]] = [OrderedDict()]

    def __iter__(self) -> Iterator[tuple[int, SessionKey]]:
        return ((use, key) for page in self._pages for key, use in page.items())

    def use(self, key: SessionKey) -> int | None:
        """Look up the session's use; None: it is not there."""
        return next((page[key] for page in self._pages if key in page), None)

    def append(self, key: SessionKey, use: int) -> None:
        """Put a session that is not there behind all others."""
        if len(self._pages[-1]) >= LRU_PAGE:
            self._join_two()
            self._pages.append(OrderedDict())
        self._pages[-1][key] = use

    def prepend(self, key: SessionKey, use: int) -> None:
        """Put a session that is not there before all others."""
        if len(self._pages[0]) >= LRU_PAGE:
            self._join_two()
            self._pages.insert(0, OrderedDict())
        self._pages[0][key] = use
        self._pages[0].move_to_end(key, last=False)

    def remove(self, key: SessionKey) -> int | None:
        """Take a session out; returns its use, None if it was not there."""
        for index, page in enumerate(self._pages):
            if key in page:
                use = page.pop(key)
                if not page and len(self._pages) > 1:
                    del self._pages[index]
                return use
        return None

    def _join_two(self) -> None:
        """Make one page of two that hold little, before there is one more."""
        for index, (page, other) in enumerate(pairwise(self._pages)):
            if len(page) + len(other) <= LRU_PAGE // 2:
                self._pages[index : index + 2] = [OrderedDict(page | other)]
                return
