"""The eviction policies, and the table of them by name.

Pure. `fifo` and `lru` consider neither the queue nor the future. `lookahead_queue` evicts idle
sessions first and then queued ones from the queue's tail. `lookahead` is the paper's look-ahead
eviction, to the letter. `predictive` ranks idle sessions by the expected benefit of keeping them.
What they have in common is in `EvictionPolicy`.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvd.core.eviction.idle_sessions import IdleSessions
from kvd.core.eviction.policy import (
    ALL_AT_ONCE,
    END,
    ENDED,
    IDLE,
    QUEUED,
    RUNNING,
    EvictionPolicy,
    PolicyContext,
    PolicyMaker,
    SessionFacts,
)
from kvd.core.eviction.queue_window import QueuePlace, Touched
from kvd.core.eviction.session_order import EvictionRank, Guard
from kvd.core.records.tier import Tier
from shared.types.session_key import SessionKey

SOME_AT_ONCE = 1024  # sessions that one call ranks again, if there are more than ALL_AT_ONCE


class LruPolicy(EvictionPolicy):
    """Least recently used first.

    *Source:* the baseline of CachedAttention §4.3.4.
    """

    name = "lru"


class FifoPolicy(EvictionPolicy):
    """By first store. A session that was dropped and comes back counts from its return.

    *Source:* the baseline of CachedAttention §4.3.4.
    """

    name = "fifo"

    def _rank(
        self,
        key: SessionKey,  # noqa: ARG002
        facts: SessionFacts,
        tier: Tier | None,  # noqa: ARG002
    ) -> EvictionRank:
        return ENDED if facts.is_ended else IDLE, facts.first_use


class LookaheadQueuePolicy(EvictionPolicy):
    """Look-ahead eviction over the whole queue. Sessions without a waiting turn go by last use.

    A running session is in the engine's memory, so its copy in DRAM is useless until the session is
    stored again. In other tiers it counts as just used, because that copy may be the only one.

    *Source:* CachedAttention §3.3.2, without the limit of its window: beyond a window, evicting
    the least recently used takes exactly the queued sessions that are needed next.
    """

    name = "lookahead_queue"
    looks_ahead = True

    def _rank(self, key: SessionKey, facts: SessionFacts, tier: Tier | None) -> EvictionRank:
        place = self._place_of(key)
        if place is not None:
            return QUEUED, *later_first(place)
        if self._queue.is_running(key):
            return (RUNNING if tier is Tier.DRAM else IDLE), END, facts.last_use
        return super()._rank(key, facts, tier)

    def _place_of(self, key: SessionKey) -> QueuePlace | None:
        """Return the place in the queue for which a session is kept; None if there is none."""
        return self._queue.place(key)


def later_first(place: QueuePlace) -> EvictionRank:
    """Return numbers that sort places from the tail of the queue to its head."""
    starts_at_ns, engine_id, (priority, tag, number), _ = place
    return -starts_at_ns, -engine_id, -priority, -tag, -number


class LookaheadPolicy(LookaheadQueuePolicy):
    """Sessions in the eviction window go last, from the window's tail. Others go by last use.

    The window has `L_ew = (C_mem + C_disk) / S_kv` requests. Its edge moves when victims are
    determined: by about one session for each request that has come or left since, O(log requests)
    each.

    *Source:* CachedAttention §3.3.2 (the order outside the window is not stated there).
    """

    name = "lookahead"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._window = context.eviction_window
        self._edge: QueuePlace | None = None  # the first place outside; None: all are inside

    def _update_ranks(self, now_ns: int) -> None:  # noqa: ARG002
        edge = self._queue.place_at(self._window())
        for _, _, _, key in self._queue.between(self._edge, edge):
            self._rerank(key)
        self._edge = edge

    def _place_of(self, key: SessionKey) -> QueuePlace | None:
        place = super()._place_of(key)
        is_inside = place is not None and (self._edge is None or place < self._edge)
        return place if is_inside else None


class PredictivePolicy(LookaheadQueuePolicy):
    """As `lookahead_queue`, but idle sessions are ranked by the rate at which they return.

    The rate is learned from the sessions seen so far (IdleSessions, ReturnHazards). Of sessions
    with equal rates the least recently used is evicted first; before anything is learned all rates
    are equal. A session's rate changes with its age, at O(log sessions) for each change. It also
    changes when the rates are learned again. That is rare, and all sessions are then ranked again,
    some at a time if they are many.

    A session whose answer called tools (`on_await`) is rated like others that waited for these
    tools (ToolReturns). For about as long as nine of ten calls take, it ranks above sessions of
    people. After that it is rated as what it has become, a session whose tool has not answered.
    Holding it that long regardless of its rate was tried, and is worse (kvd/PLAN.md): a session
    that is past its tool's usual time, but not among the slowest tenth yet, keeps room from one
    that has just called a tool.

    While a turn with a tool's results runs, no session that is only likely to return is read ahead.
    The running turn's session is about to need the room again, and a read under way cannot give it
    back.

    *Source:* the queue part is CachedAttention §3.3.2. The rest is for the time when no queue says
    which session is next.
    """

    name = "predictive"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._idle = IdleSessions()
        self._outdated: Iterator[SessionKey] = iter(())  # still ranked by the rates learned before
        self._at_work: set[SessionKey] = set()  # running, or queued, with the results of tools

    def on_submit(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy."""
        self._wake(key)
        if self._idle.awaits(key):
            self._at_work.add(key)
        self._idle.on_submit(key, now_ns)

    def on_queue(self, keys: Touched, unqueued: Iterable[SessionKey], now_ns: int) -> None:
        """See EvictionPolicy."""
        super().on_queue(keys, unqueued, now_ns)
        self._idle.on_busy(keys.keys())
        for key in unqueued:
            facts = self._facts.get(key)
            if self._queue.is_running(key):
                continue
            self._at_work.discard(key)
            if not (facts and facts.is_ended):
                self._idle.on_idle(key, now_ns)

    def on_access(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy. The idle time of an idle session begins again."""
        super().on_access(key, now_ns)
        self._idle.on_store(key)
        if self._queue.place(key) is None and not self._queue.is_running(key):
            self._idle.on_idle(key, now_ns)

    def on_insert(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        super().on_insert(key, tier)
        if key in self._facts:
            self._idle.on_store(key)

    def on_resize(self, key: SessionKey, num_tokens: int) -> None:
        """See EvictionPolicy."""
        self._idle.on_resize(key, num_tokens)
        self._rerank(key)

    def on_end(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        super().on_end(key)
        self._idle.on_busy((key,))

    def on_await(self, key: SessionKey, tools: Sequence[str], now_ns: int) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        if not self._queue.is_queued(key):  # otherwise it has returned already
            self._wake(key)
            self._idle.on_await(key, tools)
            self._rerank(key)

    def on_remove(self, key: SessionKey) -> None:
        """See EvictionPolicy. The session is still watched for a while."""
        super().on_remove(key)
        self._idle.on_drop(key)

    def returning(self, now_ns: int) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        self._update_ranks(now_ns)
        if self._at_work:
            return  # the room in DRAM will be needed again at once
        for guard in reversed(Guard):
            order = self._orders[Tier.SSD]
            for key in order.downwards((guard, IDLE), (guard, IDLE, END)):
                if not self._idle.rate(key):
                    break
                if not self.ranks(key, Tier.DRAM):
                    yield key

    def _rank(self, key: SessionKey, facts: SessionFacts, tier: Tier | None) -> EvictionRank:
        rate = self._idle.rate(key)
        if rate:  # only idle sessions have a rate: no turn waits or runs, and it has not ended
            return IDLE, rate, facts.last_use
        rank = super()._rank(key, facts, tier)
        return (IDLE, rate, facts.last_use) if rank == (IDLE, facts.last_use) else rank

    def _wake(self, key: SessionKey) -> SessionFacts | None:
        if key in self._resting:
            self._idle.on_store(key)
        return super()._wake(key)

    def _update_ranks(self, now_ns: int) -> None:
        for key in self._idle.pop_aged(now_ns):
            self._rerank(key)
        if self._idle.learn_if_due():
            self._outdated = iter([*self._facts])
        most = ALL_AT_ONCE if len(self._facts) <= ALL_AT_ONCE else SOME_AT_ONCE
        for key in islice(self._outdated, most):
            self._rerank(key)


_POLICIES = (FifoPolicy, LruPolicy, LookaheadPolicy, LookaheadQueuePolicy, PredictivePolicy)

POLICIES: dict[str, PolicyMaker] = {maker.name: maker for maker in _POLICIES}
