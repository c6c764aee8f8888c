"""LruOrder: sessions by last use, in O(1) per call. Pure."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from shared.session_key import SessionKey


class LruOrder:
    """Sessions, least recently used first; *guarded* ones come after all the others.

    Every call is O(1).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[SessionKey, None] = OrderedDict()
        self._guarded_order: OrderedDict[SessionKey, None] = OrderedDict()
        self._guarded: set[SessionKey] = set()  # in an order or not

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._order or key in self._guarded_order

    def __iter__(self) -> Iterator[SessionKey]:
        return chain(self._order, self._guarded_order)

    def touch(self, key: SessionKey) -> None:
        """Put the session at the warm end."""
        order = self._order_of(key)
        order[key] = None
        order.move_to_end(key)

    def enter(self, key: SessionKey) -> None:
        """Put the session at the warm end, unless it is in the order."""
        self._order_of(key).setdefault(key)

    def enter_before(self, key: SessionKey) -> None:
        """Put the session at the cold end, unless it is in the order."""
        order = self._order_of(key)
        if key not in order:
            order[key] = None
            order.move_to_end(key, last=False)

    def end(self, key: SessionKey) -> None:
        """Move the session to the cold end, if it is in the order."""
        order = self._order_of(key)
        if key in order:
            order.move_to_end(key, last=False)

    def leave(self, key: SessionKey) -> None:
        """Take the session out; it stays guarded."""
        self._order_of(key).pop(key, None)

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

    def _order_of(self, key: SessionKey) -> OrderedDict[SessionKey, None]:
        return self._guarded_order if key in self._guarded else self._order
