"""LruOrder: sessions by last use, in a bounded time per call, however many they are. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, pairwise

from shared.types.session_key import SessionKey

PAGE = 1 << 16  # sessions in one table: one of a million takes a tenth of a second to grow


class LruOrder:
    """Sessions, least recently used first; *guarded* ones come after all the others.

    Calls are O(1) up to PAGE sessions; of more, each of their pages is asked for the session.
    """

    def __init__(self) -> None:
        self._order = _PagedOrder()
        self._guarded_order = _PagedOrder()
        self._guarded: set[SessionKey] = set()  # in an order or not

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._order or key in self._guarded_order

    def __iter__(self) -> Iterator[SessionKey]:
        return chain(self._order, self._guarded_order)

    def touch(self, key: SessionKey) -> None:
        """Put the session at the warm end."""
        order = self._order_of(key)
        order.remove(key)
        order.append(key)

    def enter(self, key: SessionKey) -> None:
        """Put the session at the warm end, unless it is in the order."""
        order = self._order_of(key)
        if key not in order:
            order.append(key)

    def enter_before(self, key: SessionKey) -> None:
        """Put the session at the cold end, unless it is in the order."""
        order = self._order_of(key)
        if key not in order:
            order.prepend(key)

    def end(self, key: SessionKey) -> None:
        """Move the session to the cold end, if it is in the order."""
        order = self._order_of(key)
        if order.remove(key):
            order.prepend(key)

    def leave(self, key: SessionKey) -> None:
        """Take the session out; it stays guarded."""
        self._order_of(key).remove(key)

    def guard(self, key: SessionKey, *, is_guarded: bool) -> None:
        """Have the session come after all that are not guarded, or among them."""
        was_here = key in self
        self.leave(key)
        if is_guarded:
            self._guarded.add(key)
        else:
            self._guarded.discard(key)
        if was_here:
            self.touch(key)

    def remove(self, key: SessionKey) -> None:
        """Forget the session."""
        self.leave(key)
        self._guarded.discard(key)

    def _order_of(self, key: SessionKey) -> "_PagedOrder":
        return self._guarded_order if key in self._guarded else self._order


class _PagedOrder:
    """Sessions in an order, page by page."""

    def __init__(self) -> None:
        self._pages: list[OrderedDict[SessionKey, None]] = [OrderedDict()]

    def __contains__(self, key: SessionKey) -> bool:
        return any(key in page for page in self._pages)

    def __iter__(self) -> Iterator[SessionKey]:
        return chain.from_iterable(self._pages)

    def append(self, key: SessionKey) -> None:
        """Put a session that is not there behind all others."""
        if len(self._pages[-1]) >= PAGE:
            self._join_two()
            self._pages.append(OrderedDict())
        self._pages[-1][key] = None

    def prepend(self, key: SessionKey) -> None:
        """Put a session that is not there before all others."""
        if len(self._pages[0]) >= PAGE:
            self._join_two()
            self._pages.insert(0, OrderedDict())
        self._pages[0][key] = None
        self._pages[0].move_to_end(key, last=False)

    def remove(self, key: SessionKey) -> bool:
        """Take a session out; returns whether it was there."""
        for index, page in enumerate(self._pages):
            if key in page:
                del page[key]
                if not page and len(self._pages) > 1:
                    del self._pages[index]
                return True
        return False

    def _join_two(self) -> None:
        """Make one page of two that hold little, before there is one more."""
        for index, (page, other) in enumerate(pairwise(self._pages)):
            if len(page) + len(other) <= PAGE // 2:
                self._pages[index : index + 2] = [OrderedDict.fromkeys(chain(page, other))]
                return
