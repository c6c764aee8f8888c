"""RankedPolicy: what all policies have in common: facts of sessions, and an order per tier.

Pure. A policy is a warmth: numbers, compared in turn, of which the first is the band. The bands,
coldest first: *ended* sessions, *running* ones in DRAM (their KV is in the engine's memory), *idle*
ones, *queued* ones. Guarded sessions, in the same bands, come after all the others.

Invariant: facts are kept of the sessions in the order of all tiers, and of guarded ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import inf

from kvd.core.eviction.policy import PolicyContext
from kvd.core.eviction.session_order import SessionOrder, Warmth
from kvd.core.queue_window import QueuePlace
from kvd.core.records import Tier
from shared.session_key import SessionKey

ENDED, RUNNING, IDLE, QUEUED = range(4)  # bands
END = inf  # of a band, or of all of them


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
        self._num_uses = 0
        self._orders: dict[Tier | None, SessionOrder] = {
            tier: SessionOrder(partial(self._guarded_warmth, tier)) for tier in (None, *Tier)
        }

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
        if key in self._facts:
            self._changed(key)

    def touched(self, key: SessionKey, now_ns: int) -> None:  # noqa: ARG002
        """See EvictionPolicy."""
        facts = self._facts_of(key)
        facts.last_use = self._next_use()
        facts.is_ended = False
        for order in self._orders.values():
            order.enter(key)
        self._changed(key)

    def sized(self, key: SessionKey, num_tokens: int) -> None:  # noqa: B027
        """See EvictionPolicy."""

    def ended(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        if key in self._facts:
            self._facts[key].is_ended = True
            self._changed(key)

    def guarded(self, key: SessionKey, *, is_guarded: bool) -> None:
        """See EvictionPolicy; the end of a guard counts as a use."""
        if not is_guarded and key not in self._facts:
            return
        facts = self._facts_of(key)
        if facts.is_guarded and not is_guarded:
            facts.last_use = self._next_use()
        facts.is_guarded = is_guarded
        self._changed(key)

    def removed(self, key: SessionKey) -> None:
        """See EvictionPolicy."""
        self._facts.pop(key, None)
        for order in self._orders.values():
            order.leave(key)

    # -------------------------------------------------------------------------------- its bytes

    def entered(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy; a session that was never used counts as used now."""
        self._facts_of(key)
        self._orders[None].enter(key)
        self._orders[tier].enter(key)

    def left(self, key: SessionKey, tier: Tier) -> None:
        """See EvictionPolicy."""
        self._orders[tier].leave(key)

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """See EvictionPolicy."""
        return key in self._orders[tier]

    # ------------------------------------------------------------------------------------ asked

    def victims(
        self, tier: Tier | None, now_ns: int, *, colder_than: SessionKey | None = None
    ) -> Iterator[SessionKey]:
        """See EvictionPolicy."""
        if colder_than is None:
            return self._between((False,), (True, END), tier, now_ns)
        warmth = self._warmth_of(colder_than, tier)
        if not warmth[0]:
            return self._between((False,), warmth, tier, now_ns)
        needed_sooner = warmth[1:] if warmth[1] == QUEUED else (QUEUED,)  # though not guarded
        return chain(
            self._between((False,), (False, *needed_sooner), tier, now_ns),
            self._between((True,), warmth, tier, now_ns),
        )

    def returning(self, now_ns: int) -> Iterator[SessionKey]:  # noqa: ARG002
        """See EvictionPolicy."""
        return iter(())

    # ----------------------------------------------------------------------------------- inside

    def _between(
        self,
        coldest: Warmth,
        warmest: Warmth,
        tier: Tier | None,
        now_ns: int,  # noqa: ARG002
    ) -> Iterator[SessionKey]:
        """Sessions from one warmth to below another, coldest first."""
        return self._orders[tier].between(coldest, warmest)

    def _warmth_of(self, key: SessionKey, tier: Tier | None) -> Warmth:
        """How warm a session is that need not be in the order; one never used is idle and cold."""
        warmth = self._orders[tier].warmth(key)
        if warmth is not None:
            return warmth
        if key in self._facts:
            return self._guarded_warmth(tier, key)
        return (False, *self._warmth(key, SessionFacts(-1, -1), tier))

    def _guarded_warmth(self, tier: Tier | None, key: SessionKey) -> Warmth:
        facts = self._facts[key]
        return (facts.is_guarded, *self._warmth(key, facts, tier))

    def _facts_of(self, key: SessionKey) -> SessionFacts:
        facts = self._facts.get(key)
        if facts is None:
            use = self._next_use()
            facts = self._facts[key] = SessionFacts(use, use)
        return facts

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def _changed(self, key: SessionKey) -> None:
        for order in self._orders.values():
            order.change(key)
