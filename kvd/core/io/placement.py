"""Placement: make room in a tier by evicting blocks, in the policy's order of sessions.

Pure. The policy ranks sessions. Here their blocks are evicted in that order, from the end of each
session, so that what remains is a prefix. Rules:
1. a block that a session of higher rank uses, too, stays for that session (D5: a victim that frees
   nothing is skipped);
2. a block that is being read, moved or built on stays, and so do a hard-pinned session's blocks;
3. in DRAM clean blocks go first. Dirty ones go, and their sessions are cut there, only when the
   writer says that SSD cannot take them (`Writer.make_slots`);
4. a running session gives DRAM back early (the policy ranks it so), but only what its engine has
   loaded and SSD holds: engines store what is new behind it, and a gap would cost all of that. Its
   other blocks go when nothing else is left;
5. for a tenant's quota only its own sessions go, from all tiers, and no leased or busy one;
6. reading ahead takes room only from sessions that may give way to it, or from idle ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from kvd.core.io.announcing import announce
from kvd.core.records.actions import EVICTED
from kvd.core.records.tier import Admission, Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey

MOST_LOOKED_AT = 64  # sessions looked at per call, for room that no caller waits for


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule for one eviction pass: which blocks it may evict.

    Attributes:
        tier: the tier to evict from; None: from all.
        may_cut: whether it may evict the last copy of a block, which cuts its sessions.
        may_take_running: whether it may evict the blocks that rule 4 keeps.
    """

    tier: Tier | None
    may_cut: bool
    may_take_running: bool = False

    @property
    def takes_clean(self) -> bool:
        """Whether only clean blocks in DRAM are evicted."""
        return self.tier is Tier.DRAM and not self.may_cut

    def num_users(self, block: Block) -> int:
        """Return how many users answer for the block in this pass, hard-pinned ones included."""
        if self.tier is None:
            return len(block.users)
        return block.num_answer_clean if self.takes_clean else block.num_answer(self.tier)


@dataclass(slots=True)
class _Plan:
    """The blocks that one eviction pass takes.

    Attributes:
        blocks: the blocks.
        packed: sessions, and how many of their last packed blocks.
        emptied: sessions that then have nothing left in the tier.
        spent: sessions that then have no clean blocks left.
        passed: sessions that the pass has looked at.
        num_passed: by key of a shared block, how many of its users are among those.
        num_taken: number of blocks, packed ones included.
    """

    blocks: list[Block] = field(default_factory=list)
    packed: list[tuple[Session, int]] = field(default_factory=list)
    emptied: list[SessionKey] = field(default_factory=list)
    spent: list[SessionKey] = field(default_factory=list)
    passed: set[SessionKey] = field(default_factory=set)
    num_passed: dict[bytes, int] = field(default_factory=dict)
    num_taken: int = 0

    def pass_user(self, block: Block, num_users: int) -> bool:
        """Count one more of a block's users as passed; returns whether another one keeps it.

        The other one is hard-pinned, or comes later in the order. O(1), because both the passed
        users and all `num_users` that answer for the block are counted.
        """
        if num_users == 1:
            return False
        num_passed = self.num_passed[block.key] = self.num_passed.get(block.key, 0) + 1
        return num_passed < num_users


class Placement:
    """Makes room in the tiers of one cache state."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    # ---------------------------------------------------------------------------------------- DRAM

    def evict(self, num_wanted: int, *, may_cut: bool) -> int:
        """Evict until `num_wanted` slots are free, as far as possible; returns how many are.

        Dirty blocks are evicted only if `may_cut`.
        """
        for rule in self._rules(may_cut=may_cut):
            num_short = num_wanted - self._state.slots.num_free
            if not may_cut:  # do not search an arena full of dirty blocks for clean ones
                num_short = min(num_short, self._num_clean())
            if num_short > 0:
                order = self._victims(Tier.DRAM, clean=rule.takes_clean)
                self._apply(self._plan(rule, num_short, order), rule)
        return self._state.slots.num_free

    def evict_clean(self, num_blocks: int) -> None:
        """Evict so many clean blocks, as far as a bounded search finds them."""
        self._evict_from(num_blocks, self._victims(Tier.DRAM, clean=True))

    def evict_for(self, key: SessionKey, num_blocks: int) -> None:
        """Evict clean blocks of sessions that may give way to this one; a bounded search."""
        self._evict_from(num_blocks, self._victims(Tier.DRAM, key, clean=True))

    def evict_idle(self, num_blocks: int) -> None:
        """Evict so many clean blocks of idle sessions; see `_idle`."""
        self._evict_from(num_blocks, self._idle())

    def has_idle(self) -> bool:
        """Whether an idle session may have clean blocks in DRAM."""
        return next(self._idle(), None) is not None

    def dirty_to_evict(self, num_wanted: int) -> list[Block]:
        """Return the dirty blocks that would be evicted next if dirty blocks had to go."""
        blocks: list[Block] = []
        for rule in self._rules(may_cut=True):
            if len(blocks) < num_wanted:
                blocks = self._plan(rule, num_wanted, self._victims(Tier.DRAM)).blocks
        return [block for block in blocks if block.dirty]

    def _evict_from(self, num_blocks: int, order: Iterable[SessionKey]) -> None:
        num_short = min(num_blocks, self._num_clean())
        if num_short > 0:
            rule = _Rule(Tier.DRAM, may_cut=False)
            self._apply(self._plan(rule, num_short, islice(order, MOST_LOOKED_AT)), rule)

    def _num_clean(self) -> int:
        """Return how many blocks in DRAM are on SSD, too, including leased ones and reads."""
        return self._state.blocks.num_dram - self._state.blocks.num_dirty

    def _idle(self) -> Iterator[SessionKey]:
        """Yield sessions that do not need DRAM: ended ones, and running ones that were loaded.

        They are the first ones in the order.
        """
        sessions, placement = self._state.sessions, self._state.placement

        def is_early(key: SessionKey) -> bool:
            return sessions[key].ended or placement.queue.is_running(key)

        return (
            key
            for key in takewhile(is_early, self._victims(Tier.DRAM, clean=True))
            if sessions[key].ended or placement.is_released(key)
        )

    # --------------------------------------------------------------------------------- other tiers

    def make_extents(self, num_short: int, giving_way_to: SessionKey | None) -> None:
        """Begin to drop `num_short` blocks from SSD, of sessions that give way to this one.

        None: all sessions give way.
        """
        if num_short > 0:
            rule = _Rule(Tier.SSD, may_cut=True)
            self._apply(self._plan(rule, num_short, self._victims(Tier.SSD, giving_way_to)), rule)

    def make_quota(self, tenant: str, num_wanted: int) -> bool:
        """Evict a tenant's own sessions for its next blocks, if its quota requires it.

        Returns:
            Whether the tenant may have `num_wanted` more blocks now.
        """
        tenants = self._state.tenants
        order = tenants.order_of(tenant)
        if order is None or not tenants.may_ever_have(tenant, num_wanted):
            return order is None  # evict nothing if the blocks exceed the quota in any case
        num_over = tenants.num_over(tenant, num_wanted)
        if num_over:
            rule = _Rule(None, may_cut=True)
            self._apply(self._plan(rule, num_over, order), rule)
        return not tenants.num_over(tenant, num_wanted)

    def drop_victim(self) -> bool:
        """Drop the first session in the order that is not leased, hard-pinned or busy.

        Costs O(sessions that are leased or busy).

        Returns:
            Whether there was one.
        """
        for key in self._victims(None):
            if self._may_drop(key):
                self._state.outbox.count("sessions_dropped")
                announce(self._state, self._state.sessions[key])
                self._state.cut(self._state.sessions[key], 0, EVICTED)
                return True
        return False

    # ------------------------------------------------------------------------------------ planning

    def _victims(
        self, tier: Tier | None, giving_way_to: SessionKey | None = None, *, clean: bool = False
    ) -> Iterable[SessionKey]:
        state = self._state
        return state.policy.victims(tier, state.now_ns, giving_way_to=giving_way_to, clean=clean)

    def _rules(self, *, may_cut: bool) -> Iterable[_Rule]:
        """Yield the rules of the passes over DRAM, which are made until there is room."""
        yield _Rule(Tier.DRAM, may_cut)
        if self._state.placement.has_busy:
            yield _Rule(Tier.DRAM, may_cut, may_take_running=True)

    def _plan(self, rule: _Rule, num_wanted: int, order: Iterable[SessionKey]) -> _Plan:
        """Plan which blocks of the sessions to evict, in this order."""
        plan = _Plan()
        for key in order:
            if not self._is_victim(key, rule):
                continue
            plan.passed.add(key)
            if self._take_from(self._state.sessions[key], rule, plan, num_wanted):
                plan.emptied.append(key)
            if plan.num_taken >= num_wanted:
                break
            if rule.takes_clean:
                plan.spent.append(key)
        return plan

    def _is_victim(self, key: SessionKey, rule: _Rule) -> bool:
        """Whether a pass may evict blocks of a session at all; see rules 4 and 5."""
        if rule.tier is None:
            return self._may_drop(key)
        if rule.tier is Tier.SSD or rule.may_take_running:
            return True
        placement = self._state.placement
        return not placement.queue.is_running(key) or placement.is_released(key)

    def _may_drop(self, key: SessionKey) -> bool:
        state = self._state
        return not state.leases.num_of_session(key) and not state.placement.is_busy(key)

    def _may_cut(self, key: SessionKey, rule: _Rule) -> bool:
        is_kept = rule.tier is Tier.DRAM and self._state.placement.queue.is_running(key)
        return rule.may_cut and (rule.may_take_running or not is_kept)

    def _take_from(self, victim: Session, rule: _Rule, plan: _Plan, num_wanted: int) -> bool:
        """Add a session's blocks to the plan, last ones first.

        Returns:
            Whether the session then has nothing left in the tier.
        """
        is_emptied = True
        if victim.packed and rule.tier is not Tier.DRAM:
            num_packed = min(victim.num_packed, num_wanted - plan.num_taken)
            plan.packed.append((victim, num_packed))
            plan.num_taken += num_packed
            is_emptied = num_packed == victim.num_packed
        may_cut = self._may_cut(victim.key, rule)
        for block_key in reversed(victim.block_keys()):
            if plan.num_taken >= num_wanted:
                return False
            block = self._state.blocks[block_key]
            if not _is_in(block, rule.tier) or plan.pass_user(block, rule.num_users(block)):
                continue
            if _may_take(block, rule, may_cut=may_cut):
                plan.blocks.append(block)
                plan.num_taken += 1
            else:
                is_emptied = False
                may_cut = may_cut and block.may_vanish()  # a block in use keeps all before it
        return is_emptied

    # ------------------------------------------------------------------------------------- evicting

    def _apply(self, plan: _Plan, rule: _Rule) -> None:
        """Evict what a pass has planned."""
        state = self._state
        counter = f"evictions_{rule.tier.value if rule.tier else 'quota'}"
        if rule.tier is not None:
            self._record_rest(plan, rule.tier)
        for session, num_packed in plan.packed:
            state.outbox.count(counter, num_packed)
            num_sessions = len(state.sessions)
            announce(state, session)
            state.cut_packed(session, num_packed, EVICTED)
            state.outbox.count("sessions_dropped", num_sessions - len(state.sessions))
        if rule.tier is not None:
            for key in plan.spent:
                state.users.stop_offering(state.sessions[key])
            for key in plan.emptied:
                self._record_emptied(key, rule.tier)
        if rule.tier is Tier.DRAM:
            for key in filter(state.placement.queue.is_queued, plan.passed):
                state.placement.prefetching.reopen(key)  # its blocks have to be read again
        state.outbox.count(counter, len(plan.blocks))
        for block in reversed(plan.blocks):  # first blocks first, so that a session is cut once
            if _is_in(block, rule.tier):  # else an earlier cut has dropped it, too
                self._take(block, rule.tier)

    def _record_rest(self, plan: _Plan, tier: Tier) -> None:
        """Record how long the sessions that leave the tier have been unused."""
        state = self._state
        for key in plan.emptied:
            last_access_ns = state.sessions[key].last_access_ns
            state.histograms.on_evict(key, tier, last_access_ns, state.now_ns)

    def _take(self, block: Block, tier: Tier | None) -> None:
        """Evict one block from a tier; if that was its last copy, cut its sessions there."""
        state = self._state
        if _is_last_copy(block, tier):
            for key in block.users if state.limits.announces_evictions else ():
                announce(state, state.sessions[key])
            state.outbox.count("sessions_dropped", state.cut_users(block, EVICTED))
        elif tier is Tier.DRAM:
            state.record_block_move(block, MoveKind.EVICTED_DRAM)
            state.leave_dram(block)
        else:
            state.record_block_move(block, MoveKind.EVICTED_SSD)
            state.leave_ssd(block)
            if state.limits.admission is not Admission.ON_EVICT:
                state.unwritten.refuse(block)  # dirty again

    def _record_emptied(self, key: SessionKey, tier: Tier) -> None:
        """Record that a session has nothing left in the tier."""
        session = self._state.sessions.get(key)
        if session is not None:
            self._state.users.on_evict(session, tier)
            if tier is Tier.DRAM:
                self._state.tails.pack_later(key)


def _may_take(block: Block, rule: _Rule, *, may_cut: bool) -> bool:
    if _is_last_copy(block, rule.tier):
        return may_cut and block.may_vanish()
    return block.io is BlockIo.IDLE and (rule.tier is Tier.SSD or not block.readers)


def _is_in(block: Block, tier: Tier | None) -> bool:
    return any(map(block.resides, Tier)) if tier is None else block.resides(tier)


def _is_last_copy(block: Block, tier: Tier | None) -> bool:
    """Whether the block is lost when it leaves the tier (None: all tiers)."""
    return tier is None or not block.resides(Tier.SSD if tier is Tier.DRAM else Tier.DRAM)
