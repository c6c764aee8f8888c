"""EvictionPolicy: ranks sessions for eviction, for each tier.

Pure. A policy knows nothing of blocks, bytes in a tier or leases. For each tier it keeps an order
of the sessions that may have bytes there. A session without bytes may be in an order: the caller
that makes room removes it when it finds none. Bytes in a tier always have a user in its order.

One more order is of the sessions that may have *clean* bytes in DRAM: bytes that are on SSD too and
not in use, and so may leave DRAM at once. A caller that makes room without writing examines these
sessions only, and not every session that has nothing to give at the moment.

A policy gives each session an eviction rank: a tuple of numbers, compared in turn. The lowest rank
is evicted first. The first number is the band. The bands, in order of eviction: *ended* sessions,
*running* ones in DRAM (their KV is in the engine's memory), *idle* ones, *queued* ones. Guarded
sessions, in the same bands, come after all others: first retained ones, then pinned ones.

A retained session may be idle for an hour, and must not keep DRAM from sessions in use. So it is
guarded in DRAM only if SSD cannot have it.

Sessions that recovery found rest (RestingSessions) until something happens to them. They are idle.
They count as in the order of all tiers and in that of SSD, without an entry of their own in either.

Invariant: facts are kept of the sessions in the order of all tiers that do not rest, and of guarded
sessions.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain
from math import inf

from kvd.core.eviction.queue_window import QueueWindow, Touched
from kvd.core.eviction.session_order import EvictionRank, Guard, RestingSessions, SessionOrder
from kvd.core.records.tier import Tier
from shared.types.session_key import SessionKey

ENDED, RUNNING, IDLE, QUEUED = range(4)  # bands
ALL_AT_ONCE = 8192  # most sessions that one call ranks again: tens of milliseconds
END = inf  # above every rank of a band, or above all bands
RESTING_KEY = SessionKey("", "", "")  # stands for any resting session: no turn of it waits or runs


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The facts that a policy may use.

    Attributes:
        queue: the queues of all engines, merged.
        eviction_window: the paper's L_ew, in requests, now.
        has_ssd: whether there is an SSD tier.
    """

    queue: QueueWindow
    eviction_window: Callable[[], int]
    has_ssd: bool = True


@dataclass(slots=True)
class SessionFacts:
    """Facts about one session.

    Attributes:
        first_use: number of its first use since it came.
        last_use: number of its last use.
    """

    first_use: int
    last_use: int
    is_ended: bool = False
    guard: Guard = Guard.NONE


class EvictionPolicy:
    """Ranks sessions for eviction. Every call is O(log sessions), and so is each victim.

    Attributes:
        name: the policy's name in the settings.
        looks_ahead: whether sessions that are queued, or likely to return, are read from SSD ahead
            of their loads.
    """

    name: str
    looks_ahead = False

    def __init__(self, context: PolicyContext) -> None:
        self._queue = context.queue
        self._has_ssd = context.has_ssd
        self._facts: dict[SessionKey, SessionFacts] = {}
        self._resting = RestingSessions()
        self._num_uses = 0
        self._orders: dict[Tier | None, SessionOrder[EvictionRank]] = {
            tier: SessionOrder(partial(self._guarded_rank, tier), ALL_AT_ONCE)
            for tier in (None, *Tier)
        }
        self._clean = SessionOrder(partial(self._guarded_rank, Tier.DRAM), ALL_AT_ONCE)
        self._all_orders = (*self._orders.values(), self._clean)

    def _rank(
        self,
        key: SessionKey,  # noqa: ARG002
        facts: SessionFacts,
        tier: Tier | None,  # noqa: ARG002
    ) -> EvictionRank:
        """Rank a session: its band, then numbers unique in the band. By default, its last use."""
        return ENDED if facts.is_ended else IDLE, facts.last_use

    def _update_ranks(self, now_ns: int) -> None:
        """Bring ranks up to date, before victims are determined."""

    # -------------------------------------------------------------------------- a session's life

    def on_submit(self, key: SessionKey, now_ns: int) -> None:
        """Record that a turn of the session was submitted. The session need not be stored."""

    def on_queue(self, keys: Touched, unqueued: Iterable[SessionKey], now_ns: int) -> None:  # noqa: ARG002
        """Record that the state of these sessions in the queue has changed; some do not wait.

        A running session's KV is in the engine's memory, so in DRAM it is evicted before others. On
        SSD it is not, because that may be the only copy.
        """
        if self._resting:
            for key in keys:
                self._wake(key)
        for order in self._all_orders:
            order.change(keys)

    def on_access(self, key: SessionKey, now_ns: int) -> None:  # noqa: ARG002
        """Record that the session is used now. It enters the order of every tier."""
        facts = self._facts_of(key)
        facts.last_use = self._next_use()
        facts.is_ended = False
        for order in self._orders.values():
            order.enter(key)
        self._rerank(key)
        self._settle_many()

    def on_resize(self, key: SessionKey, num_tokens: int) -> None:
        """Record how many tokens are stored of the session, after a store."""

    def on_end(self, key: SessionKey) -> None:
        """Record that the session has ended: it is evicted first, until it is used again."""
        facts = self._wake(key)
        if facts is not None:
            facts.is_ended = True
            self._rerank(key)

    def on_supersede(self, key: SessionKey) -> None:
        """Record that another session continues in its place: it is evicted like an ended one.

        This holds until it is used again, because the guess may be wrong. Guards stay: among
        sessions with its guard it goes first.
        """
        self.on_end(key)

    def on_await(self, key: SessionKey, tools: Sequence[str], now_ns: int) -> None:
        """Record that the session returns when these tools have answered. It need not be stored.

        This holds until the next `on_submit` of the session. The engine reports it apart from its
        queue, so the queue may report only later that the turn that calls the tools has ended. The
        base class ignores it.
        """

    def guard(self, key: SessionKey, guard: Guard) -> None:
        """Rank the session after all sessions with a lower guard, from now on.

        The end of a pin counts as a use. The end of a retention does not.
        """
        if self._wake(key) is None and not guard:
            return
        facts = self._facts_of(key)
        if guard < facts.guard is Guard.PINNED:
            facts.last_use = self._next_use()
        facts.guard = guard
        self._rerank(key)

    def on_remove(self, key: SessionKey) -> None:
        """Remove the session from every order, because it is dropped or hard-pinned."""
        if self._resting.wake(key) is not None:
            return  # it was nowhere else
        self._facts.pop(key, None)
        for order in self._all_orders:
            order.leave(key)

    # -------------------------------------------------------------------------------- its bytes

    def on_restore(self, keys: Sequence[SessionKey]) -> None:
        """Add sessions of an earlier kvd, in order of eviction. All have bytes on SSD.

        Called before anything else. Further facts of a session follow by `guard`, `on_end` and
        `on_insert`.
        """
        self._resting.restore(keys, self._num_uses + 1)
        self._num_uses += len(keys)

    def on_insert(self, key: SessionKey, tier: Tier) -> None:
        """Record bytes in a tier without a use: a late write, or a shared block it answers for.

        A session that was never used counts as used now.
        """
        if tier is Tier.SSD and key in self._resting:
            return
        self._facts_of(key)
        self._orders[None].enter(key)
        self._orders[tier].enter(key)
        self._settle_many()

    def on_evict(self, key: SessionKey, tier: Tier) -> None:
        """Record that the session has nothing more to give in this tier."""
        self._wake(key)
        self._orders[tier].leave(key)
        if tier is Tier.DRAM:
            self._clean.leave(key)

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """Whether the session is in this tier's order."""
        return key in self._orders[tier] or (tier is Tier.SSD and key in self._resting)

    def start_offering(self, key: SessionKey) -> None:
        """Record that the session, which is in the order of DRAM, has clean bytes there."""
        self._clean.enter(key)

    def stop_offering(self, key: SessionKey) -> None:
        """Record that the session has no clean bytes to give, until `start_offering`."""
        self._clean.leave(key)

    def offers(self, key: SessionKey) -> bool:
        """Whether the session is in the order of those that may have clean bytes."""
        return key in self._clean

    # ---------------------------------------------------------------------------------- queries

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,
        *,
        giving_way_to: SessionKey | None = None,
        clean: bool = False,
    ) -> Iterator[SessionKey]:
        """Yield sessions in order of eviction. No other method may be called meanwhile.

        Args:
            tier: the tier to make room in; None: over all tiers.
            now_ns: the time.
            giving_way_to: yield only sessions that may give way to this one, so none that is needed
                sooner. It need not be in the order itself.
            clean: yield only sessions that may have clean bytes in DRAM, which `tier` has to be.
        """
        self._update_ranks(now_ns)
        between = self._clean.between if clean else partial(self._between, tier)
        if giving_way_to is None:
            return between((Guard.NONE,), (Guard.PINNED, END))
        guard, *rank = self._rank_of(giving_way_to, tier)
        needed_sooner = rank if rank[0] == QUEUED else (QUEUED,)  # although it has a lower guard
        return chain.from_iterable(  # lazily: each look at an order may place sessions in it
            between((level,), (level, *(rank if level == guard else needed_sooner)))
            for level in Guard
            if level <= guard
        )

    def returning(self, now_ns: int) -> Iterator[SessionKey]:  # noqa: ARG002
        """Yield sessions on SSD, not in DRAM, that are likely to return soon, likeliest first.

        Sessions that are queued or running are not among them. No other method may be called
        meanwhile.
        """
        return iter(())

    # ----------------------------------------------------------------------------------- inside

    def _between(
        self, tier: Tier | None, low: EvictionRank, high: EvictionRank
    ) -> Iterator[SessionKey]:
        """Yield the sessions with ranks in [low, high), in order of eviction."""
        order = self._orders[tier]
        if tier is Tier.DRAM or not self._resting:
            return order.between(low, high)
        rank_of = partial(self._resting_rank, tier)
        resting = self._resting.between(low, high, rank_of)
        return (key for _, key in merge(resting, order.ranked_between(low, high)))

    def _resting_rank(self, tier: Tier | None, use: int) -> EvictionRank:
        return (Guard.NONE, *self._rank(RESTING_KEY, SessionFacts(use, use), tier))

    def _rank_of(self, key: SessionKey, tier: Tier | None) -> EvictionRank:
        """Rank a session that need not be in the order; one never used is idle, and goes early."""
        rank = self._orders[tier].rank(key)
        if rank is not None:
            return rank
        use = self._resting.use(key)
        if use is not None:
            return self._resting_rank(tier, use)
        if key in self._facts:
            return self._guarded_rank(tier, key)
        return (Guard.NONE, *self._rank(key, SessionFacts(-1, -1), tier))

    def _guarded_rank(self, tier: Tier | None, key: SessionKey) -> EvictionRank:
        facts = self._facts[key]
        is_elsewhere = tier is Tier.DRAM and self._has_ssd and facts.guard is Guard.RETAINED
        return (Guard.NONE if is_elsewhere else facts.guard, *self._rank(key, facts, tier))

    def _wake(self, key: SessionKey) -> SessionFacts | None:
        """Give a resting session an entry of its own; return its facts, or None if unknown."""
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
        for order in self._all_orders:
            order.settle_many()

    def _rerank(self, key: SessionKey) -> None:
        for order in self._all_orders:
            order.change({key: None})


PolicyMaker = Callable[[PolicyContext], EvictionPolicy]
