"""EvictionPolicy: what ranks sessions for eviction, per tier.

Pure. A policy knows nothing of blocks, bytes in a tier or leases. For each tier it keeps an order
of the sessions that may have bytes there. Being in an order without bytes is allowed (who makes
room takes such a session out when it meets it), having bytes and no user in the order is not.

One order more is of the sessions that may have *clean* bytes in DRAM: those that are on SSD too
and not in use, so that they may go at once. Who makes room without writing looks at these only, and
not at every session that has nothing to give just then.

A policy is an eviction rank for each session: numbers, compared in turn, of which the first is the
band, and the lowest go first. The bands, in order of eviction: *ended* sessions, *running* ones in
DRAM (their KV is in the engine's memory), *idle* ones, *queued* ones. Guarded sessions, in the same
bands, come after all the others: first those that are retained, then those that are pinned.

A session that is retained may be idle for an hour, and is not to hold DRAM against those in use: it
is guarded there only if SSD cannot have it.

Sessions that a start found rest (RestingSessions) until something happens to them: they are idle,
in the order of all tiers and in that of SSD, with no entry of their own in either.

Invariant: facts are kept of the sessions in the order of all tiers that do not rest, and of guarded
ones.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain
from math import inf

from kvd.core.eviction.queue_window import QueueWindow, Touched
from kvd.core.eviction.session_order import EvictionRank, Guard, RestingSessions, SessionOrder
from kvd.core.records.records import Tier
from shared.types.session_key import SessionKey

ENDED, RUNNING, IDLE, QUEUED = range(4)  # bands
ALL_AT_ONCE = 8192  # sessions that are ranked anew in one call: tens of milliseconds
END = inf  # of a band, or of all of them
NOBODY = SessionKey("", "", "")  # stands for any session that rests: no turn of it waits or runs


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at.

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
    """What is known of a session.

    Attributes:
        first_use: number of the use that it came with.
        last_use: number of its last use.
    """

    first_use: int
    last_use: int
    is_ended: bool = False
    guard: Guard = Guard.NONE


class EvictionPolicy:
    """See the module docstring. Every call is O(log sessions), and so is each victim.

    Attributes:
        name: names it in the settings.
        looks_ahead: whether sessions that wait, or are likely to return, are read from SSD in
            advance.
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
        """Rank a session: its band, and numbers that no other in the band has; by its last use."""
        return ENDED if facts.is_ended else IDLE, facts.last_use

    def _pass_time(self, now_ns: int) -> None:
        """Have ranks be those of now, before victims are asked for."""

    # -------------------------------------------------------------------------- a session's life

    def on_submit(self, key: SessionKey, now_ns: int) -> None:
        """Record that a turn of the session was submitted; perhaps nothing is stored of it."""

    def on_queue(self, keys: Touched, now_ns: int) -> None:  # noqa: ARG002
        """Record that the queue says something else of these sessions: where they wait, or run.

        A running session's KV is in the engine's memory: in DRAM it goes before others. In SSD it
        does not, it may be the only copy.
        """
        if self._resting:
            for key in keys:
                self._wake(key)
        for order in self._all_orders:
            order.change(keys)

    def on_access(self, key: SessionKey, now_ns: int) -> None:  # noqa: ARG002
        """Record that the session is used now; it enters the order of every tier."""
        facts = self._facts_of(key)
        facts.last_use = self._next_use()
        facts.is_ended = False
        for order in self._orders.values():
            order.enter(key)
        self._changed(key)
        self._settle_many()

    def on_resize(self, key: SessionKey, num_tokens: int) -> None:
        """Record how much is stored of the session, after it was stored."""

    def on_end(self, key: SessionKey) -> None:
        """Record that the session will not come back: first victim, until touched again."""
        facts = self._wake(key)
        if facts is not None:
            facts.is_ended = True
            self._changed(key)

    def on_supersede(self, key: SessionKey) -> None:
        """Record that another session goes on in its place: it goes first, as one that has ended.

        Until it is used again: the guess may be wrong. What guards it still does, among others
        that are guarded as it is.
        """
        self.on_end(key)

    def on_await(self, key: SessionKey, tools: Sequence[str], now_ns: int) -> None:
        """Record that the session is back when these tools have answered; perhaps it is not stored.

        Holds until the next `on_submit` of it. The engine says so on a way of its own: its queue
        may say only afterwards that the turn which calls them runs no more. Here it changes
        nothing.
        """

    def guard(self, key: SessionKey, guard: Guard) -> None:
        """Rank the session after all that are guarded less, from now on.

        That it is pinned no more counts as a use; the end of a retention does not.
        """
        if self._wake(key) is None and not guard:
            return
        facts = self._facts_of(key)
        if guard < facts.guard is Guard.PINNED:
            facts.last_use = self._next_use()
        facts.guard = guard
        self._changed(key)

    def on_remove(self, key: SessionKey) -> None:
        """Take the session out of every order: it is dropped, or hard-pinned."""
        if self._resting.wake(key) is not None:
            return  # it was nowhere else
        self._facts.pop(key, None)
        for order in self._all_orders:
            order.leave(key)

    # -------------------------------------------------------------------------------- its bytes

    def on_restore(self, keys: Sequence[SessionKey]) -> None:
        """Take in sessions of an earlier kvd in order of eviction, all with bytes on SSD.

        Before any other call. What is known of one beyond its place follows, as `guard`, `on_end`
        and `on_insert`.
        """
        self._resting.restore(keys, self._num_uses + 1)
        self._num_uses += len(keys)

    def on_insert(self, key: SessionKey, tier: Tier) -> None:
        """Record bytes in this tier without a use (a late write, a shared block it answers for).

        A session that was never used counts as used now.
        """
        if tier is Tier.SSD and key in self._resting:
            return
        self._facts_of(key)
        self._orders[None].enter(key)
        self._orders[tier].enter(key)
        self._settle_many()

    def on_evict(self, key: SessionKey, tier: Tier) -> None:
        """Record that nothing of it is to be had in this tier."""
        self._wake(key)
        self._orders[tier].leave(key)
        if tier is Tier.DRAM:
            self._clean.leave(key)

    def ranks(self, key: SessionKey, tier: Tier) -> bool:
        """Whether the session is in this tier's order."""
        return key in self._orders[tier] or (tier is Tier.SSD and key in self._resting)

    def offered(self, key: SessionKey) -> None:
        """Record that the session, which is in the order of DRAM, has clean bytes there."""
        self._clean.enter(key)

    def spent(self, key: SessionKey) -> None:
        """Record that it has none that it could give, until they are offered again."""
        self._clean.leave(key)

    def offers(self, key: SessionKey) -> bool:
        """Whether the session is in the order of those that may have clean bytes."""
        return key in self._clean

    # ------------------------------------------------------------------------------------ asked

    def victims(
        self,
        tier: Tier | None,
        now_ns: int,
        *,
        giving_way_to: SessionKey | None = None,
        clean: bool = False,
    ) -> Iterator[SessionKey]:
        """Yield sessions in order of eviction; None: over all tiers. No other call meanwhile.

        With `clean`, which is for DRAM, only those that may have clean bytes there.
        With `giving_way_to`, only those that may give way to this session, which need not be in the
        order itself: none that is needed sooner.
        """
        self._pass_time(now_ns)
        between = self._clean.between if clean else partial(self._between, tier)
        if giving_way_to is None:
            return between((Guard.NONE,), (Guard.PINNED, END))
        guard, *rank = self._rank_of(giving_way_to, tier)
        needed_sooner = rank if rank[0] == QUEUED else (QUEUED,)  # though guarded less
        return chain.from_iterable(  # one look after the other: each gives sessions their places
            between((level,), (level, *(rank if level == guard else needed_sooner)))
            for level in Guard
            if level <= guard
        )

    def returning(self, now_ns: int) -> Iterator[SessionKey]:  # noqa: ARG002
        """Yield sessions on SSD and not in DRAM that are likely to return soon, likeliest first.

        Sessions of which a turn waits or runs are not among them. No other call meanwhile.
        """
        return iter(())

    # ----------------------------------------------------------------------------------- inside

    def _between(
        self, tier: Tier | None, low: EvictionRank, high: EvictionRank
    ) -> Iterator[SessionKey]:
        """Return the sessions from one rank to below another, in order of eviction."""
        order = self._orders[tier]
        if tier is Tier.DRAM or not self._resting:
            return order.between(low, high)
        rank_of = partial(self._resting_rank, tier)
        resting = self._resting.between(low, high, rank_of)
        return (key for _, key in merge(resting, order.ranked_between(low, high)))

    def _resting_rank(self, tier: Tier | None, use: int) -> EvictionRank:
        return (Guard.NONE, *self._rank(NOBODY, SessionFacts(use, use), tier))

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
        for order in self._all_orders:
            order.settle_many()

    def _changed(self, key: SessionKey) -> None:
        for order in self._all_orders:
            order.change({key: None})


PolicyMaker = Callable[[PolicyContext], EvictionPolicy]
