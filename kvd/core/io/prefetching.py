"""Prefetching: read sessions from SSD into DRAM before their turns need them.

Pure. Sessions with a waiting turn come first, in the order of the queue and within the look-ahead
window L_pw = C_mem / S_kv. Then, into idle room, come sessions that the policy expects to return
soon. One session is read at a time. It is chosen again for each block, so that a change of the
queue takes effect at once. No more reads begin for a turn that has left the queue.

Invariants:
1. prefetching takes no slot that stores will need, and evicts only sessions that may give way: for
   a waiting session none that is needed sooner, for one that is only expected none but idle ones;
2. between two uses of a session at most MOST_TIMES its number of blocks are read ahead, however
   often they are evicted, and a session that is only expected is read once: so reads and evictions
   cannot keep each other going;
3. while a store or load waits for slots, prefetching takes none;
4. a search that found no room is repeated only after something has changed, and every call looks
   at a bounded number of sessions.

*Source:* CachedAttention §3.3.1. Two things are our own: late reads yield, and sessions are read
that have no turn yet.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice
from math import ceil

from kvd.core.io.placement import MOST_LOOKED_AT, Placement
from kvd.core.io.reading import Reader
from kvd.core.io.writing import Writer
from kvd.core.records.actions import SESSION_READ_AHEAD
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

MOST_TIMES = 2  # times that a session's blocks are read ahead between two uses of it
MOST_STEPS = 16  # per call: reads begun, and sessions found to need none
MOST_KEPT = 8  # at most one of so many slots is kept for stores
EVICT_BATCH = 16  # blocks evicted at a time, because each search walks the order
YIELD_NS = NS_PER_S // 50  # pause after a caller had to wait for slots
LOOK_NS = NS_PER_S // 4  # between two searches for sessions that are likely to return


@dataclass(slots=True, eq=False)
class ReadPlan:
    """A session that is being read ahead.

    Attributes:
        session: the session.
        missing: keys of its blocks on SSD whose reads are not begun, as of the plan's making.
        is_waiting: whether a turn of it waits; if not, it is likely to return.
        num_begun: number of reads begun.
    """

    session: Session
    missing: deque[bytes]
    is_waiting: bool
    num_begun: int = 0

    def next_block(self, state: CacheState) -> Block | None:
        """Return the next block to read; skip those that are no longer missing.

        Since the plan was made a block may have been lost or read by a load, or the session may
        have other tokens now. Then only other sessions use the block, perhaps none that ranks in
        DRAM, and eviction would not find it.
        """
        while self.missing:
            block = state.blocks.get(self.missing[0])
            if block is not None and self.session.key in block.users and _is_missing(block):
                return block
            self.missing.popleft()
        return None

    def record_begun(self, state: CacheState) -> None:
        """Record that the read of the next block begins."""
        self.missing.popleft()
        self.num_begun += 1
        self.session.num_read_ahead += 1
        state.users.on_insert(self.session, Tier.DRAM)


def plan_session(state: CacheState, key: SessionKey, *, is_waiting: bool) -> ReadPlan | None:
    """Plan the reads of a session; O(its blocks). None: nothing to read, or read too often already.

    The session is unpacked, and ranks in DRAM with the blocks that it has there.
    """
    session = state.sessions.get(key)
    if session is None or session.num_read_ahead >= MOST_TIMES * session.num_spans:
        return None
    state.tails.unpack(session)
    keys = session.block_keys()
    missing = deque(key for key in keys if _is_missing(state.blocks[key]))
    if len(missing) < len(keys):
        state.users.start_offering(session)
    is_too_much = session.num_read_ahead + len(missing) > MOST_TIMES * session.num_spans
    return None if is_too_much or not missing else ReadPlan(session, missing, is_waiting)


def _is_missing(block: Block) -> bool:
    """Whether a block on SSD could be read into DRAM."""
    return block.slot_id is None and block.extent is not None and block.io is BlockIo.IDLE


class Prefetcher:
    """Reads sessions of one cache state ahead, and keeps the watermark of free slots.

    Args:
        state: the cache's tables.
        placement: makes room for reads.
        writer: keeps the watermark.
        reader: begins the reads.
    """

    def __init__(
        self, state: CacheState, placement: Placement, writer: Writer, reader: Reader
    ) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._reader = reader
        self._plan: ReadPlan | None = None
        self._no_room_at = -1  # Outbox.num_freed when there was nothing to do, or no room for it
        self._has_more = False  # whether the last call has ended at MOST_STEPS
        self._num_waits = 0  # Outbox.num_waits when it was last read
        self._yields_until_ns = 0
        self._is_looking = False  # whether a search for likely sessions is under way
        self._next_look_ns = 0
        self._is_stopped = self._is_over = False

    def resume(self) -> None:
        """Keep the watermark and begin reads; called when no other call is in progress."""
        if not self._is_over:
            self._writer.keep_free()
        self._has_more = False
        if not self._is_enabled():
            return
        self._pause_for_waiters()
        self._schedule_look()
        self._drop_stale_plan()
        for _ in range(MOST_STEPS):
            if not self._may_begin():
                return
            if not self._step():
                self._no_room_at = self._state.outbox.num_freed
                return
        self._has_more = True

    def on_queue_change(self) -> None:
        """Plan again, because the queue has changed; it also ends a `stop`."""
        self._is_stopped = False
        self.reschedule()

    def reschedule(self) -> None:
        """Try again though there was no room, because other sessions may give way now."""
        self._no_room_at = -1

    def stop(self, *, for_good: bool = False) -> None:
        """Begin no reads until an engine reports its queue, because the arena is being emptied.

        With `for_good`, begin none at all any more: kvd shuts down.
        """
        self._is_stopped = True
        self._is_over |= for_good
        self._num_waits = self._state.outbox.num_waits
        self._use_plan(None)

    def next_deadline_ns(self) -> int | None:
        """Return when to call `resume` though nothing has happened; None: no such time."""
        if not self._is_enabled():
            return None
        if self._has_more:
            return self._state.now_ns
        if self._is_pausing():
            return max(self._reader.retry_at_ns, self._yields_until_ns)
        if not self._may_look() or not self._has_budget():
            return None
        return max(self._next_look_ns, self._state.now_ns + 1)

    # ----------------------------------------------------------------------------------- conditions

    def _is_enabled(self) -> bool:
        state = self._state
        is_wanted = state.limits.prefetch_bytes > 0 and state.policy.looks_ahead
        return is_wanted and len(state.slots) > 0 and not self._is_stopped and not self._is_over

    def _is_pausing(self) -> bool:
        return self._state.now_ns < max(self._reader.retry_at_ns, self._yields_until_ns)

    def _pause_for_waiters(self) -> None:
        """Pause after a store or load had to wait, so that it gets the slots that become free."""
        if self._num_waits != self._state.outbox.num_waits:
            self._num_waits = self._state.outbox.num_waits
            self._yields_until_ns = self._state.now_ns + YIELD_NS
            self._no_room_at = -1

    def _has_budget(self) -> bool:
        return self._reader.ahead_bytes < self._state.limits.prefetch_bytes

    def _may_begin(self) -> bool:
        has_no_room = self._no_room_at == self._state.outbox.num_freed
        return not has_no_room and self._has_budget() and not self._is_pausing()

    def _may_look(self) -> bool:
        """Whether sessions may be read that are only likely to return."""
        state = self._state
        num_stored = state.blocks.num_ssd + state.tails.num_blocks
        return state.limits.reads_returning and num_stored > 0

    def _schedule_look(self) -> None:
        if self._state.now_ns >= self._next_look_ns and self._may_look():
            self._next_look_ns = self._state.now_ns + LOOK_NS
            self._is_looking = True
            self._no_room_at = -1

    # ------------------------------------------------------------------------------------- choosing

    def _step(self) -> bool:
        """Begin a read, or find that a session needs none; returns False if nothing can be done."""
        state = self._state
        key = state.placement.prefetching.pick(self._window(), self._is_in_time)
        if key is not None:
            if self._plan is None or self._plan.session.key != key:
                self._use_plan(plan_session(state, key, is_waiting=True))
            if self._plan is None:
                state.placement.prefetching.settle(key)
                return True
        elif self._plan is None and (
            len(state.placement.prefetching) or not self._plan_returning()
        ):
            return False
        return self._read_next()

    def _window(self) -> int:
        """Return the look-ahead window in requests; at least 1, which is read as far as it fits."""
        return max(1, self._state.prefetch_window)

    def _is_in_time(self, key: SessionKey, starts_in_ns: int) -> bool:
        """Whether a session can be read before its turn starts, after the reads under way."""
        if not starts_in_ns:
            return True
        session = self._state.sessions.get(key)
        num_bytes = self._reader.ahead_bytes
        if session is not None:
            num_bytes += self._num_missing(session) * self._state.shape.full_bytes
        return self._reader.rate.estimate_ns(num_bytes) <= starts_in_ns

    def _num_missing(self, session: Session) -> int:
        """Estimate how many blocks of a session are to be read.

        A session that has some blocks in DRAM is rarely packed, so its packed blocks are a good
        estimate.
        """
        if self._plan is not None and self._plan.session is session:
            return len(self._plan.missing)
        return session.num_packed or session.num_spans

    def _plan_returning(self) -> bool:
        """Plan the session likeliest to return, if there is idle room; returns whether it did.

        The search ends when none is found, and is repeated after LOOK_NS.
        """
        if self._is_looking and self._has_idle_room():
            key = self._find_likeliest()
            if key is not None:
                self._use_plan(plan_session(self._state, key, is_waiting=False))
                if self._plan is not None:
                    return True
        self._is_looking = False
        return False

    def _find_likeliest(self) -> SessionKey | None:
        """Return the session that is likeliest to return of those that may be read."""
        likely = islice(self._state.policy.returning(self._state.now_ns), MOST_LOOKED_AT)
        return next(filter(self._may_be_read_once, likely), None)

    def _may_be_read_once(self, key: SessionKey) -> bool:
        session = self._state.sessions.get(key)
        if session is None or session.ended or session.num_read_ahead:
            return False
        return not self._state.placement.is_busy(key)

    # ------------------------------------------------------------------------------------- planning

    def _use_plan(self, plan: ReadPlan | None) -> None:
        """Continue with another plan; the session before may be packed again."""
        self._plan = plan
        self._state.tails.kept_unpacked = plan.session.key if plan else None

    def _drop_stale_plan(self) -> None:
        """Drop the plan if its session is gone, or its turn has left the queue."""
        plan = self._plan
        if plan is None:
            return
        state, key = self._state, plan.session.key
        is_known = state.sessions.get(key) is plan.session
        is_busy = state.placement.is_busy(key)
        is_as_it_was = state.placement.queue.is_queued(key) if plan.is_waiting else not is_busy
        if is_known and is_as_it_was:
            return
        if is_known and plan.is_waiting and not is_busy:
            state.outbox.count("prefetch_cancelled")
        self._use_plan(None)

    # -------------------------------------------------------------------------------------- reading

    def _read_next(self) -> bool:
        """Begin the plan's next read, or finish the plan; returns False if there is no room."""
        state, plan = self._state, self._plan
        assert plan is not None, "a session was chosen"
        block = plan.next_block(state)
        if block is None:
            self._finish(plan)
            return True
        if not self._has_room(plan):
            return False
        plan.record_begun(state)
        self._reader.read_ahead(block)
        return True

    def _finish(self, plan: ReadPlan) -> None:
        """Report a plan whose reads have all begun."""
        key = plan.session.key
        self._use_plan(None)
        self._state.placement.prefetching.settle(key)
        if plan.num_begun:
            why = "queued" if plan.is_waiting else "likely"
            self._state.outbox.emit(
                SESSION_READ_AHEAD, key, {"num_blocks": plan.num_begun, "why": why}
            )

    def _has_room(self, plan: ReadPlan) -> bool:
        """Whether a spare slot is free, after evictions if needed."""
        if self._num_spare() > 0:
            return True
        num_wanted = min(len(plan.missing), EVICT_BATCH) - self._num_spare()
        if plan.is_waiting:
            self._placement.evict_for(plan.session.key, num_wanted)
        else:
            self._placement.evict_idle(num_wanted)
        if self._num_spare() > 0:
            return True
        if not plan.is_waiting:
            self._use_plan(None)
            self._is_looking = False
        return False

    def _has_idle_room(self) -> bool:
        return self._num_spare() > 0 or self._placement.has_idle()

    def _num_spare(self) -> int:
        """Return how many slots are free beyond the watermark and the next stores of running turns.

        In a small arena the watermark alone is less than those stores need, and they would evict
        what was read ahead.
        """
        state = self._state
        num_stored = ceil(state.mean_store_blocks * state.placement.queue.num_sessions_running)
        num_kept = min(num_stored, len(state.slots) // MOST_KEPT)
        return state.slots.num_free - max(num_kept, state.num_kept_free)
