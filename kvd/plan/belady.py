"""The policy `belady`, which knows when each session comes back. For the planner only. Pure.

It bounds what any policy can reach: sessions that never return are evicted first, then those that
return last; a queued session is as near as its place in the queue. It is optimal for sessions of
equal size, greedy otherwise. Sessions whose users think are prefetched in the order of their
returns.

*Source:* L. A. Belady, A study of replacement algorithms for a virtual-storage computer, 1966.
"""

from collections.abc import Iterable, Iterator, Mapping

from sortedcontainers import SortedDict

from kvd.core.eviction.policies import later_first
from kvd.core.eviction.policy import (
    ENDED,
    IDLE,
    QUEUED,
    EvictionPolicy,
    PolicyContext,
    SessionFacts,
)
from kvd.core.eviction.queue_window import Touched
from kvd.core.eviction.session_order import EvictionRank
from kvd.core.records.tier import Tier
from shared.types.session_key import SessionKey


class BeladyPolicy(EvictionPolicy):
    """Evicts the session that returns last.

    Args:
        context: see EvictionPolicy.
        returns_ns: when each session's KV is needed next; absent: never. An entry is set before the
            session's use is recorded, and stays until its next turn comes.
    """

    name = "belady"
    looks_ahead = True

    def __init__(self, context: PolicyContext, returns_ns: Mapping[SessionKey, int]) -> None:
        super().__init__(context)
        self._returns_ns = returns_ns
        self._absent: SortedDict[tuple[int, SessionKey], None] = (
            SortedDict()
        )  # only on SSD, no turn
        self._absent_until: dict[SessionKey, int] = {}

    def on_queue(self, keys: Touched, unqueued: Iterable[SessionKey], now_ns: int) -> None:
        """See EvictionPolicy."""
        super().on_queue(keys, unqueued, now_ns)
        for key in keys:
            self._reorder(key)

    def on_access(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy."""
        super().on_access(key, now_ns)
        self._reorder(key)

    def on_insert(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        super().on_insert(key, tier)
        self._reorder(key)

    def on_evict(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        super().on_evict(key, tier)
        self._reorder(key)

    def on_remove(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        super().on_remove(key)
        self._reorder(key)

    def returning(self, now_ns: int) -> Iterator[SessionKey]:  # noqa: ARG002
        """See EvictionPolicy."""
        return (key for _, key in self._absent)

    def _rank(
        self,
        key: SessionKey,
        facts: SessionFacts,
        tier: Tier | None,  # noqa: ARG002
    ) -> EvictionRank:
        place = self._queue.place(key)
        if place is not None:
            return QUEUED, *later_first(place)
        returns_ns = self._returns_ns.get(key)
        if returns_ns is None:
            return ENDED, facts.last_use
        return IDLE, -returns_ns, facts.first_use

    def _reorder(self, key: SessionKey) -> None:
        """Update whether the session is only on SSD and will return."""
        before_ns = self._absent_until.pop(key, None)
        if before_ns is not None:
            del self._absent[before_ns, key]
        returns_ns = self._returns_ns.get(key)
        if returns_ns is None or self.ranks(key, Tier.DRAM) or not self.ranks(key, Tier.SSD):
            return
        self._absent[returns_ns, key] = None
        self._absent_until[key] = returns_ns
