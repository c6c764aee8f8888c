"""Policy `lru`: least recently used first. Pure; neither the queue nor the future is looked at."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, takewhile

from kvd.core.eviction.policy import PolicyContext
from kvd.core.queue_window import QueuePlace
from kvd.core.records import Tier
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


class LruPolicy:
    """Least recently used first.

    A session that enters a tier without being used enters at the warm end: exact order is kept for
    uses only.
    """

    name = "lru"
    looks_ahead = False

    def __init__(self, context: PolicyContext) -> None:  # noqa: ARG002
        self._all = LruOrder()
        self._orders = {tier: LruOrder() for tier in Tier}

    def arrived(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy."""

    def engaged(
        self, key: SessionKey, place: QueuePlace | None, now_ns: int, *, is_running: bool
    ) -> None:
        """See EvictionPolicy."""

    def sized(self, key: SessionKey, num_tokens: int) -> None:
        """See EvictionPolicy."""

    def touched(self, key: SessionKey, now_ns: int) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        for order in self._every_order():
            order.touch(key)

    def ended(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        for order in self._every_order():
            order.end(key)

    def guarded(self, key: SessionKey, *, is_guarded: bool) -> None:
        """See EvictionPolicy."""
        for order in self._every_order():
            order.guard(key, is_guarded=is_guarded)

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        self._all.enter(key)
        self._orders[tier].enter(key)

    def left(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        self._orders[tier].leave(key)

    def removed(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        for order in self._every_order():
            order.remove(key)

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """See EvictionPolicy."""
        return key in self._orders[tier]

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,  # noqa: ARG002
        *,
        colder_than: SessionKey | None = None,
    ) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        order = self._all if tier is None else self._orders[tier]
        return takewhile(lambda key: key != colder_than, order)

    def returning(self, now_ns: int) -> Iterator[SessionKey]:  # noqa: ARG002
        """See EvictionPolicy."""
        return iter(())

    def _every_order(self) -> tuple[LruOrder, ...]:
        return self._all, *self._orders.values()
