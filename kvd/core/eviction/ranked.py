"""RankedPolicy: what all policies have in common: facts of sessions, and an order per tier.

Pure. A policy is a warmth: numbers, compared in turn, of which the first is the band. The bands,
coldest first: *ended* sessions, *running* ones in DRAM (their KV is in the engine's memory), *idle*
ones, *queued* ones. Guarded sessions, in the same bands, come after all the others.

Sessions that a start found rest (RestingSessions) until something happens to them: they are idle,
in the order of all tiers and in that of SSD, with no entry of their own in either.

Invariant: facts are kept of the sessions in the order of all tiers that do not rest, and of guarded
ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain
from math import inf

from kvd.core.eviction.policy import PolicyContext
from kvd.core.eviction.queue_window import QueuePlace
from kvd.core.eviction.resting_sessions import RestingSessions
from kvd.core.eviction.session_order import SessionOrder, Warmth
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey

ENDED, RUNNING, IDLE, QUEUED = range(4)  # bands
END = inf  # of a band, or of all of them
NOBODY = SessionKey("", "", "")  # stands for any session that rests: no turn of it waits or runs


@dataclass(slots=True)
class SessionFacts:
    """What is known of a session.

    Attributes:
        first_use: number of the use that it came with.
        last_use: number of its last use.
    """

    first_use: int
    last_use: int
    is_ended: bool = False
    is_guarded: bool = False


class RankedPolicy(ABC):
    """See the module docstring, and EvictionPolicy for the calls."""

    name: str
    looks_ahead: bool

    def __init__(self, context: PolicyContext) -> None:
        self._queue = context.queue
        self._facts: dict[SessionKey, SessionFacts] = {}
        self._resting = RestingSessions()
        self._num_uses = 0
        self._orders: dict[Tier | None, SessionOrder] = {
            tier: SessionOrder(partial(self._guarded_warmth, tier)) for tier in (None, *Tier)
        }
        self._clean = SessionOrder(partial(self._guarded_warmth, Tier.DRAM))

    @abstractmethod
    def _warmth(self, key: SessionKey, facts: SessionFacts, tier: Tier | None) -> Warmth:
        """Say how warm a session is: its band, and numbers that no other in the band has."""

    # -------------------------------------------------------------------------- a session's life

    def arrived(self, key: SessionKey, now_ns: int) -> None:  # noqa: B027
        """See EvictionPolicy."""

    def engaged(
        self,
        key: SessionKey,
        place: QueuePlace | None,  # noqa: ARG002
        now_ns: int,  # noqa: ARG002
        *,
        is_running: bool,  # noqa: ARG002
    ) -> None:
        """See EvictionPolicy."""
        if self._wake(key) is not None:
            self._changed(key)

    def touched(self, key: SessionKey, now_ns: int) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        facts = self._facts_of(key)
        facts.last_use = self._next_use()
        facts.is_ended = False
        for order in self._orders.values():
            order.enter(key)
        self._changed(key)
        self._settle_many()

    def sized(self, key: SessionKey, num_tokens: int) -> None:  # noqa: B027
        """See EvictionPolicy."""

    def ended(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        facts = self._wake(key)
        if facts is not None:
            facts.is_ended = True
            self._changed(key)

    def guarded(self, key: SessionKey, *, is_guarded: bool) -> None:
        """See EvictionPolicy; the end of a guard counts as a use."""
        if self._wake(key) is None and not is_guarded:
            return
        facts = self._facts_of(key)
        if facts.is_guarded and not is_guarded:
            facts.last_use = self._next_use()
        facts.is_guarded = is_guarded
        self._changed(key)

    def removed(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        if self._resting.wake(key) is not None:
            return  # it was nowhere else
        self._facts.pop(key, None)
        for order in (*self._orders.values(), self._clean):
            order.leave(key)

    # -------------------------------------------------------------------------------- its bytes

    def restored(self, keys: Sequence[SessionKey]) -> None:
        """See EvictionPolicy."""
        self._resting.restore(keys, self._num_uses + 1)
        self._num_uses += len(keys)

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy; a session that was never used counts as used now."""
        if tier is Tier.SSD and key in self._resting:
            return
        self._facts_of(key)
        self._orders[None].enter(key)
        self._orders[tier].enter(key)
        self._settle_many()

    def left(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        self._wake(key)
        self._orders[tier].leave(key)
        if tier is Tier.DRAM:
            self._clean.leave(key)

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """See EvictionPolicy."""
        return key in self._orders[tier] or (tier is Tier.SSD and key in self._resting)

    def offered(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        self._clean.enter(key)

    def spent(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        self._clean.leave(key)

    def offers(self, key: SessionKey) -> bool:
        """See EvictionPolicy."""
        return key in self._clean

    # ------------------------------------------------------------------------------------ asked

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,  # noqa: ARG002
        *,
        colder_than: SessionKey | None = None,
        clean: bool = False,
    ) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        between = self._clean.between if clean else partial(self._between, tier)
        if colder_than is None:
            return between((False,), (True, END))
        warmth = self._warmth_of(colder_than, tier)
        if not warmth[0]:
            return between((False,), warmth)
        needed_sooner = warmth[1:] if warmth[1] == QUEUED else (QUEUED,)  # though not guarded
        return chain(between((False,), (False, *needed_sooner)), between((True,), warmth))

    def returning(self, now_ns: int) -> Iterator[SessionKey]:  # noqa: ARG002
        """See EvictionPolicy."""
        return iter(())

    # ----------------------------------------------------------------------------------- inside

    def _between(self, tier: Tier | None, coldest: Warmth, warmest: Warmth) -> Iterator[SessionKey]:
        """Sessions from one warmth to below another, coldest first."""
        order = self._orders[tier]
        if tier is Tier.DRAM or not self._resting:
            return order.between(coldest, warmest)
        warmth_of = partial(self._resting_warmth, tier)
        resting = self._resting.between(coldest, warmest, warmth_of)
        return (key for _, key in merge(resting, order.ranked_between(coldest, warmest)))

    def _resting_warmth(self, tier: Tier | None, use: int) -> Warmth:
        return (False, *self._warmth(NOBODY, SessionFacts(use, use), tier))

    def _warmth_of(self, key: SessionKey, tier: Tier | None) -> Warmth:
        """How warm a session is that need not be in the order; one never used is idle and cold."""
        warmth = self._orders[tier].warmth(key)
        if warmth is not None:
            return warmth
        use = self._resting.use(key)
        if use is not None:
            return self._resting_warmth(tier, use)
        if key in self._facts:
            return self._guarded_warmth(tier, key)
        return (False, *self._warmth(key, SessionFacts(-1, -1), tier))

    def _guarded_warmth(self, tier: Tier | None, key: SessionKey) -> Warmth:
        facts = self._facts[key]
        return (facts.is_guarded, *self._warmth(key, facts, tier))

    def _wake(self, key: SessionKey) -> SessionFacts | None:
        """Rank a session by itself if it rests; returns what is known of it, if it is known."""
        use = self._resting.wake(key)
        if use is None:
            return self._facts.get(key)
        facts = self._facts[key] = SessionFacts(use, use)
        self._orders[None].enter(key)
        self._orders[Tier.SSD].enter(key)
        return facts

    def _facts_of(self, key: SessionKey) -> SessionFacts:
        facts = self._wake(key)
        if facts is None:
            use = self._next_use()
            facts = self._facts[key] = SessionFacts(use, use)
        return facts

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def _settle_many(self) -> None:
        for order in (*self._orders.values(), self._clean):
            order.settle_many()

    def _changed(self, key: SessionKey) -> None:
        for order in (*self._orders.values(), self._clean):
            order.change(key)
