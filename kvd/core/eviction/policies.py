"""The policies, and the table of them by name.

Pure. `fifo` and `lru` look neither at the queue nor at the future; `lookahead_queue` lets idle
sessions go first and then the queue, tail first; `lookahead` is the paper's look-ahead eviction, to
the letter; `predictive` ranks idle sessions by what keeping them is likely to pay. What they have
in common is `EvictionPolicy`.
"""

from collections.abc import Iterator, Sequence
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
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey

SOME_AT_ONCE = 1024  # of more


class LruPolicy(EvictionPolicy):
    """Least recently used first.

    *Source:* the baseline of CachedAttention §4.3.4.
    """

    name = "lru"


class FifoPolicy(EvictionPolicy):
    """By when a session was first stored; one that was dropped and comes back enters anew.

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
    """Look-ahead eviction over the whole queue; sessions with no turn in it go least recently used.

    A running session is in the engine's memory: its copy in DRAM is of no use before it is stored
    again. Elsewhere it counts as just used, for that copy may be the only one.

    *Source:* CachedAttention §3.3.2, without the limit of its window: beyond a window, least
    recently used first takes exactly the queued sessions that are needed next.
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
        """Return the place that a session is kept for, if there is one."""
        return self._queue.place(key)


def later_first(place: QueuePlace) -> EvictionRank:
    """Numbers that sort places from the tail of the queue to its head."""
    priority, tag, number = place.rank
    return -place.starts_at_ns, -place.engine_id, -priority, -tag, -number


class LookaheadPolicy(LookaheadQueuePolicy):
    """Sessions in the eviction window go last, tail of the window first; others go by last use.

    The window is of `L_ew = (C_mem + C_disk) / S_kv` requests. Its edge is moved when victims are
    asked for: by a session or so for each request that joined or left since, O(log requests) each.

    *Source:* CachedAttention §3.3.2 (the order outside the window is not stated there).
    """

    name = "lookahead"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._window = context.eviction_window
        self._edge: QueuePlace | None = None  # the first place outside; None: all are inside

    def _pass_time(self, now_ns: int) -> None:  # noqa: ARG002
        edge = self._queue.place_at(self._window())
        for place in self._queue.between(self._edge, edge):
            self._changed(place.key)
        self._edge = edge

    def _place_of(self, key: SessionKey) -> QueuePlace | None:
        place = super()._place_of(key)
        is_inside = place is not None and (self._edge is None or place < self._edge)
        return place if is_inside else None


class PredictivePolicy(LookaheadQueuePolicy):
    """As `lookahead_queue`, but idle sessions are ranked by the rate at which they return.

    The rate is learned from the sessions seen so far (IdleSessions, ReturnHazards); of equal rates
    the least recently used goes first, and before anything was learned all are equal. A session's
    rate changes as it gets older, O(log sessions) each time it does, and with what is learned:
    then all are ranked anew, seldom, and some at a time if they are many.

    Sessions whose answer called tools (`on_await`) are rated as others that wait for these tools
    (ToolReturns): above those of people for about as long as nine of ten calls take, and then as
    what they have become, one whose tool has not answered. To hold them that long whatever the
    rates say was tried, and is worse (kvd/PLAN.md): what is past its tool's usual time, and on its
    way to a tenth, keeps room from what has just called one.

    While a turn runs that came with a tool's results, nothing is read ahead of sessions that are
    only likely to return: its session is about to come back for the room, and what is being read
    cannot give way to it.

    *Source:* the queue part is CachedAttention §3.3.2; the rest is for when no queue says who is
    next.
    """

    name = "predictive"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._idle = IdleSessions()
        self._outdated: Iterator[SessionKey] = iter(())  # ranked by what was known before
        self._at_work: set[SessionKey] = set()  # busy with turns that tools' results came with

    def on_submit(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy."""
        self._wake(key)
        if self._idle.awaits(key):
            self._at_work.add(key)
        self._idle.on_submit(key, now_ns)

    def on_queue(self, keys: Touched, now_ns: int) -> None:
        """See EvictionPolicy."""
        super().on_queue(keys, now_ns)
        self._idle.busy(keys)
        for key in self._queue.not_queued(keys):
            facts = self._facts.get(key)
            if self._queue.is_running(key):
                continue
            self._at_work.discard(key)
            if not (facts and facts.is_ended):
                self._idle.idle(key, now_ns)

    def on_access(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy; for a session that is idle its idle time begins again."""
        super().on_access(key, now_ns)
        self._idle.stored(key)
        if self._queue.place(key) is None and not self._queue.is_running(key):
            self._idle.idle(key, now_ns)

    def on_insert(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        super().on_insert(key, tier)
        if key in self._facts:
            self._idle.stored(key)

    def on_resize(self, key: SessionKey, num_tokens: int) -> None:
        """See EvictionPolicy."""
        self._idle.on_resize(key, num_tokens)
        self._changed(key)

    def on_end(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        super().on_end(key)
        self._idle.busy((key,))

    def on_await(self, key: SessionKey, tools: Sequence[str], now_ns: int) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        if not self._queue.is_queued(key):  # else it is back already
            self._wake(key)
            self._idle.on_await(key, tools)
            self._changed(key)

    def on_remove(self, key: SessionKey) -> None:
        """See EvictionPolicy; the session is still watched for a while."""
        super().on_remove(key)
        self._idle.dropped(key)

    def returning(self, now_ns: int) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        self._pass_time(now_ns)
        if self._at_work:
            return  # their room is not idle
        for guard in reversed(Guard):
            order = self._orders[Tier.SSD]
            for key in order.downwards((guard, IDLE), (guard, IDLE, END)):
                if not self._idle.rate(key):
                    break
                if not self.ranks(key, Tier.DRAM):
                    yield key

    def _rank(self, key: SessionKey, facts: SessionFacts, tier: Tier | None) -> EvictionRank:
        rate = self._idle.rate(key)
        if rate:  # no turn of it waits or runs, and it has not ended: else it would not be idle
            return IDLE, rate, facts.last_use
        rank = super()._rank(key, facts, tier)
        return (IDLE, rate, facts.last_use) if rank == (IDLE, facts.last_use) else rank

    def _wake(self, key: SessionKey) -> SessionFacts | None:
        if key in self._resting:
            self._idle.stored(key)
        return super()._wake(key)

    def _pass_time(self, now_ns: int) -> None:
        for key in self._idle.aged(now_ns):
            self._changed(key)
        if self._idle.has_learned():
            self._outdated = iter([*self._facts])
        most = ALL_AT_ONCE if len(self._facts) <= ALL_AT_ONCE else SOME_AT_ONCE
        for key in islice(self._outdated, most):
            self._changed(key)


_POLICIES = (FifoPolicy, LruPolicy, LookaheadPolicy, LookaheadQueuePolicy, PredictivePolicy)

POLICIES: dict[str, PolicyMaker] = {maker.name: maker for maker in _POLICIES}
