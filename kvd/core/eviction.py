"""Which session goes first: the policy protocol and the base policies.

Pure. A policy ranks sessions; it knows nothing of blocks, bytes or leases. For each tier it keeps
an order of the sessions that may have bytes there. Being in an order without bytes is allowed (the
placement takes such a session out when it meets it), having bytes and no user in the order is not.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from kvd.core.records import Tier
from shared.session_key import SessionKey


class EvictionPolicy(Protocol):
    """Ranks sessions, coldest first, per tier. Every call but `victims` is O(1)."""

    @property
    def name(self) -> str:
        """Name it is configured by."""
        ...

    def touched(self, key: SessionKey, now_ns: int) -> None:
        """Note that the session is used now; it enters the order of every tier."""
        ...

    def ended(self, key: SessionKey) -> None:
        """Note that the session will not come back: first victim, until touched again."""
        ...

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """Note bytes in this tier without a use (a late write, a shared block it answers for)."""
        ...

    def left(self, key: SessionKey, tier: Tier) -> None:
        """Note that nothing of it is to be had in this tier."""
        ...

    def removed(self, key: SessionKey) -> None:
        """Forget the session (dropped, or pinned)."""
        ...

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """Whether the session is in this tier's order."""
        ...

    def victims(self, tier: Tier | None) -> Iterator[SessionKey]:
        """Yield sessions coldest first; None: over all tiers. No other call meanwhile."""
        ...


class LruPolicy:
    """Least recently used first.

    A session that enters a tier without being used enters at the warm end: exact order is kept for
    uses only.
    """

    name = "lru"

    def __init__(self) -> None:
        self._all: OrderedDict[SessionKey, None] = OrderedDict()
        self._orders: dict[Tier, OrderedDict[SessionKey, None]] = {t: OrderedDict() for t in Tier}

    def touched(self, key: SessionKey, now_ns: int) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        for order in (self._all, *self._orders.values()):
            order[key] = None
            order.move_to_end(key)

    def ended(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        for order in (self._all, *self._orders.values()):
            if key in order:
                order.move_to_end(key, last=False)

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        self._all.setdefault(key)
        self._orders[tier].setdefault(key)

    def left(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        self._orders[tier].pop(key, None)

    def removed(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        for order in (self._all, *self._orders.values()):
            order.pop(key, None)

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """See EvictionPolicy."""
        return key in self._orders[tier]

    def victims(self, tier: Tier | None) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        return iter(self._all if tier is None else self._orders[tier])


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy}


def make_policy(name: str) -> EvictionPolicy:
    """Build a policy by its configured name.

    Raises:
        KeyError: for a name outside POLICIES (configuration checks it first).
    """
    return POLICIES[name]()
