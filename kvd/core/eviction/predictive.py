"""Policy `predictive`: idle sessions go by what keeping them is likely to pay. Pure."""

from collections.abc import Iterator
from itertools import islice

from kvd.core.eviction.idle_sessions import IdleSessions
from kvd.core.eviction.lookahead_queue import LookaheadQueuePolicy
from kvd.core.eviction.policy import PolicyContext
from kvd.core.eviction.queue_window import QueuePlace
from kvd.core.eviction.ranked import END, IDLE, SessionFacts
from kvd.core.eviction.session_order import Warmth
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey

ALL_AT_ONCE = 8192  # sessions that are ranked anew in one call: tens of milliseconds
SOME_AT_ONCE = 1024  # of more


class PredictivePolicy(LookaheadQueuePolicy):
    """As `lookahead_queue`, but idle sessions are ranked by the rate at which they return.

    The rate is learned from the sessions seen so far (IdleSessions, ReturnHazards); of equal rates
    the least recently used goes first, and before anything was learned all are equal. A session's
    rate changes as it gets older, O(log sessions) each time it does, and with what is learned:
    then all are ranked anew, seldom, and some at a time if they are many.

    *Source:* the queue part is CachedAttention §3.3.2; the rest is for when no queue says who is
    next.
    """

    name = "predictive"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._idle = IdleSessions()
        self._outdated: Iterator[SessionKey] = iter(())  # ranked by what was known before

    def arrived(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy."""
        self._wake(key)
        self._idle.arrived(key, now_ns)

    def engaged(
        self, key: SessionKey, place: QueuePlace | None, now_ns: int, *, is_running: bool
    ) -> None:
        """See EvictionPolicy."""
        super().engaged(key, place, now_ns, is_running=is_running)
        facts = self._facts.get(key)
        if is_running or place is not None or (facts and facts.is_ended):
            self._idle.busy(key)
        else:
            self._idle.idle(key, now_ns)

    def touched(self, key: SessionKey, now_ns: int) -> None:
        """See EvictionPolicy; for a session that is idle its idle time begins again."""
        super().touched(key, now_ns)
        self._idle.stored(key)
        if self._queue.place(key) is None and not self._queue.is_running(key):
            self._idle.idle(key, now_ns)

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        super().entered(key, tier)
        if key in self._facts:
            self._idle.stored(key)

    def sized(self, key: SessionKey, num_tokens: int) -> None:
        """See EvictionPolicy."""
        self._idle.sized(key, num_tokens)
        self._changed(key)

    def ended(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        super().ended(key)
        self._idle.busy(key)

    def removed(self, key: SessionKey) -> None:
        """See EvictionPolicy; the session is still watched for a while."""
        super().removed(key)
        self._idle.dropped(key)

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,
        *,
        colder_than: SessionKey | None = None,
        clean: bool = False,
    ) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        self._pass_time(now_ns)
        return super().victims(tier, now_ns, colder_than=colder_than, clean=clean)

    def returning(self, now_ns: int) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        self._pass_time(now_ns)
        for is_guarded in (True, False):
            order = self._orders[Tier.SSD]
            for key in order.downwards((is_guarded, IDLE), (is_guarded, IDLE, END)):
                if not self._idle.rate(key):
                    break
                if not self.ranks(key, Tier.DRAM):
                    yield key

    def _warmth(self, key: SessionKey, facts: SessionFacts, tier: Tier | None) -> Warmth:
        rate = self._idle.rate(key)
        if rate:  # no turn of it waits or runs, and it has not ended: else it would not be idle
            return IDLE, rate, facts.last_use
        warmth = super()._warmth(key, facts, tier)
        return (IDLE, rate, facts.last_use) if warmth == (IDLE, facts.last_use) else warmth

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
