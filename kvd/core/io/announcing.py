"""Eviction announcements: emit an event for each session that will be evicted soon.

A follower of the events can then save the session to a remote store.

Pure. To save a session takes time, so it is announced while there is still room: as soon as less
than HEADROOM of its last tier is free, or held by sessions that are evicted before it. The last
tier is SSD; DRAM counts for KV that is only there, because there is no SSD, or it fails or refuses
blocks. A tenant's quota and the bound on sessions evict, too, and are checked in the same way.
Ended sessions are no loss: they are not announced, and their room counts as headroom.

A session is announced once after each use, because a use may have made it longer, and moves it away
from eviction. A session that is evicted before a look has found it (a store needed more room than
the headroom, or it became the next victim just then) is announced as it goes, so that no loss is
silent.

A look passes a bounded number of sessions, and there are so many looks per second, however much is
stored. It counts the blocks that only one session uses, not those that go with the last of several.
It looks one session farther than needed: any session may be used before it is evicted, and then
gives no room.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from math import ceil

from kvd.core.records.actions import SESSION_NEAR_EVICTION
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

HEADROOM = 1 / 16  # of a tier, quota or bound: the room that may be taken while sessions are saved
LOOK_NS = NS_PER_S // 4  # between two looks
MOST_A_LOOK = 25  # sessions announced per look
MOST_AHEAD = 1024  # sessions passed per look, for each tier, quota or bound
MOST_QUOTAS = 8  # quotas checked per look


def announce(state: CacheState, session: Session) -> bool:
    """Announce that a session is evicted soon, or now.

    Returns:
        Whether an event was emitted: it was not announced since its last use, and has not ended.
    """
    if not state.limits.announces_evictions or session.near_eviction or session.ended:
        return False
    session.near_eviction = True
    fields = {"num_tokens": session.num_tokens, "superseded": int(session.superseded)}
    state.outbox.emit(SESSION_NEAR_EVICTION, session.key, fields)
    return True


Order = Callable[[], Iterable[SessionKey]]
RoomOf = Callable[[Session], tuple[int, bool]]  # room that its eviction gives; whether KV is lost


class Announcer:
    """Announces the next evictions of one cache state, if its limits enable that."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._look_at_ns = 0
        self._is_due = False
        self._seen: tuple[int, ...] = ()  # `_snapshot` of the last look
        self._num_left = 0  # sessions that this look may still announce

    def next_deadline_ns(self) -> int | None:
        """Return when to call `look`; None: not before `consider` finds a change."""
        return self._look_at_ns if self._is_due else None

    def consider(self) -> None:
        """Schedule a look if anything has changed since the last one."""
        self._is_due = self._state.limits.announces_evictions and (
            self._is_due or self._seen != self._snapshot()
        )

    def look(self) -> None:
        """Announce some of the sessions that are near eviction, if a look is due."""
        state = self._state
        if not self._is_due or state.now_ns < self._look_at_ns:
            return
        self._look_at_ns = state.now_ns + LOOK_NS
        self._num_left = MOST_A_LOOK
        if len(state.extents):
            self._look_at_ssd()
        if not len(state.extents) or state.ssd_degraded or state.unwritten.refused:
            self._look_at_dram()
        self._look_at_sessions()
        for tenant in [*islice(state.tenants.charged, MOST_QUOTAS)]:
            self._look_at_quota(tenant)
            if self._num_left:
                del state.tenants.charged[tenant]
        self._is_due = not self._num_left or bool(state.tenants.charged)
        self._seen = self._snapshot()

    def _snapshot(self) -> tuple[int, ...]:
        """Return the figures that decide about evictions: free room, and counts of uses."""
        state, counters = self._state, self._state.outbox.counters
        return (
            *(state.slots.num_free, state.extents.num_free, len(state.sessions)),
            *(len(state.under_way.drops), len(state.unwritten), state.blocks.num_unhashed),
            len(state.tenants.charged),
            *(counters["stores"], counters["load_hits"]),
        )

    def _announce(self, num_short: int, order: Order, room_of: RoomOf) -> None:
        """Announce sessions in order of eviction until they would give `num_short`.

        They must give that even if any one of them does not, because it is used before it goes.

        Args:
            num_short: room that is missing.
            order: yields the sessions in order of eviction.
            room_of: the room that a session gives, and whether its eviction loses KV.
        """
        most_gained = 0
        for key in islice(order(), MOST_AHEAD) if num_short > 0 else ():
            if num_short + most_gained <= 0 or not self._num_left:
                break
            session = self._state.sessions[key]
            num_gained, is_loss = room_of(session)
            num_short -= num_gained
            most_gained = max(most_gained, num_gained)
            if is_loss:
                self._num_left -= announce(self._state, session)

    # ----------------------------------------------------------------------- causes of evictions

    def _look_at_ssd(self) -> None:
        """Announce sessions that are next to be evicted from SSD."""
        state = self._state

        def room_of(session: Session) -> tuple[int, bool]:
            num_own, on_ssd = self._count(session, lambda block: block.extent is not None)
            return num_own + session.num_packed, on_ssd or session.num_packed > 0

        num_free = state.extents.num_free + len(state.under_way.drops)
        num_wanted = len(state.unwritten) + state.blocks.num_unhashed
        num_short = _headroom(len(state.extents)) + num_wanted - num_free
        self._announce(num_short, partial(self._victims, Tier.SSD), room_of)

    def _look_at_dram(self) -> None:
        """Announce sessions whose KV is only in DRAM, and next to be evicted there."""
        state = self._state

        def room_of(session: Session) -> tuple[int, bool]:
            if state.placement.queue.is_running(session.key):
                return 0, False  # a running session is evicted only when nothing else is left
            num_own, _ = self._count(session, lambda block: block.slot_id is not None)
            return num_own, self._count(session, lambda block: block.dirty)[1]

        num_short = _headroom(len(state.slots)) - state.slots.num_free
        self._announce(num_short, partial(self._victims, Tier.DRAM), room_of)

    def _look_at_sessions(self) -> None:
        """Announce sessions that are next to be dropped for the bound on sessions."""
        most = self._state.limits.max_sessions

        def room_of(session: Session) -> tuple[int, bool]:
            may_drop = self._may_drop(session)
            return may_drop, may_drop

        num_short = len(self._state.sessions) + _headroom(most) - most
        self._announce(num_short, partial(self._victims, None), room_of)

    def _look_at_quota(self, tenant: str) -> None:
        """Announce sessions that are next to be evicted for a tenant's quota."""
        tenants = self._state.tenants
        order = tenants.order_of(tenant)
        if order is None:
            return

        def room_of(session: Session) -> tuple[int, bool]:
            if not self._may_drop(session):
                return 0, False
            return self._count(session, lambda _: True)[0] + session.num_packed, True

        num_short = tenants.num_over(tenant, _headroom(tenants.num_allowed(tenant)))
        self._announce(num_short, lambda: order, room_of)

    def _victims(self, tier: Tier | None) -> Iterable[SessionKey]:
        return self._state.policy.victims(tier, self._state.now_ns)

    def _may_drop(self, session: Session) -> bool:
        state = self._state
        return not state.leases.num_of_session(session.key) and not state.placement.is_busy(
            session.key
        )

    def _count(self, session: Session, counts: Callable[[Block], bool]) -> tuple[int, bool]:
        """Count blocks from a session's end on, up to the first one that is shared.

        O(blocks that only it uses).

        Args:
            session: the session.
            counts: whether a block counts.

        Returns:
            How many counted blocks only it uses; whether any block counts, the first shared one
            included.
        """
        num_own, any_counts, last_key = 0, False, b""
        for span in reversed(session.spans):
            if span.block_key == last_key:
                continue
            last_key = span.block_key
            block = self._state.blocks[last_key]
            is_counted = counts(block)
            any_counts |= is_counted
            if len(block.users) > 1:
                break
            num_own += is_counted
        return num_own, any_counts


def _headroom(num_bounded: int) -> int:
    return ceil(HEADROOM * num_bounded)
