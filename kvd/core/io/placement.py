"""Making room: which sessions lose which blocks, in which tier.

Pure. The policy ranks sessions; here their blocks are taken, in order of eviction, tail first, so
that what remains is a prefix. Rules:
1. a block that a session of higher rank uses too stays with that session (D5: a victim that frees
   nothing is skipped);
2. a block that is read, moved or built on stays; a hard-pinned session's blocks stay;
3. in DRAM clean blocks go first. Dirty ones go, and their sessions are cut there, only when the
   writer says that SSD cannot take them (`Writer.make_slots`);
4. a session that runs gives DRAM back early (the policy ranks it so), but only what its engine has
   loaded and SSD holds: engines store what is new, and a gap would cost all of it. The rest goes
   when nothing else is left;
5. for a tenant's quota only its own sessions go, from all tiers, and no leased or busy one;
6. what is read ahead takes room only from sessions that may give way to it, or from idle ones.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from kvd.core.io.announcing import announce
from kvd.core.records.actions import EVICTED
from kvd.core.records.records import Admission, Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey

MOST_LOOKED_AT = 64  # sessions, for room that nobody waits for


@dataclass(frozen=True, slots=True)
class _Rule:
    """What one pass may take."""

    tier: Tier | None  # None: from all
    may_cut: bool  # take the last copy of a block
    may_take_running: bool = False  # also what rule 4 keeps

    @property
    def takes_clean(self) -> bool:
        """Whether only clean blocks in DRAM are taken."""
        return self.tier is Tier.DRAM and not self.may_cut

    def num_users(self, block: Block) -> int:
        """Return how many of the block's users the pass may come to, hard-pinned ones besides."""
        if self.tier is None:
            return len(block.users)
        return block.num_answer_clean if self.takes_clean else block.num_answer(self.tier)


@dataclass(slots=True)
class _Plan:
    """What one pass takes, and the sessions that then have nothing more to give in the tier."""

    blocks: list[Block] = field(default_factory=list)
    packed: list[tuple[Session, int]] = field(default_factory=list)  # that many of its last ones
    emptied: list[SessionKey] = field(default_factory=list)
    spent: list[SessionKey] = field(default_factory=list)  # those that have nothing clean to give
    passed: set[SessionKey] = field(default_factory=set)
    num_passed: dict[bytes, int] = field(default_factory=dict)  # of these, users of a shared block
    num_taken: int = 0  # packed blocks included

    def pass_user(self, block: Block, num_users: int) -> bool:
        """Pass one of a block's users; returns whether it stays with another.

        That is one which is hard-pinned, or comes later in the order. O(1): the users that are
        passed are counted, and so are all that answer for the block.
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

        Dirty blocks go only if `may_cut`.
        """
        for rule in self._rules(may_cut=may_cut):
            num_short = num_wanted - self._state.slots.num_free
            if not may_cut:  # else an arena full of dirty blocks is looked through in vain
                num_short = min(num_short, self._num_clean())
            if num_short > 0:
                order = self._victims(Tier.DRAM, clean=rule.takes_clean)
                self._apply(self._plan(rule, num_short, order), rule)
        return self._state.slots.num_free

    def evict_clean(self, num_blocks: int) -> None:
        """Evict so many clean blocks, as far as a bounded look finds them."""
        self._evict_from(num_blocks, self._victims(Tier.DRAM, clean=True))

    def evict_for(self, key: SessionKey, num_blocks: int) -> None:
        """Evict so many clean blocks of sessions that may give way to this one; a bounded look."""
        self._evict_from(num_blocks, self._victims(Tier.DRAM, key, clean=True))

    def evict_idle(self, num_blocks: int) -> None:
        """Evict so many clean blocks of sessions that need them no more, or not now."""
        self._evict_from(num_blocks, self._idle())

    def has_idle(self) -> bool:
        """Whether any session that may have clean blocks in DRAM is idle."""
        return next(self._idle(), None) is not None

    def dirty_to_evict(self, num_wanted: int) -> list[Block]:
        """Name the dirty blocks that would be cut next, if room had to be made so."""
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
        """Count the blocks in DRAM that are on SSD too, being read and leased ones included."""
        return self._state.blocks.num_dram - self._state.blocks.num_dirty

    def _idle(self) -> Iterator[SessionKey]:
        """Yield the sessions that have ended or run elsewhere: the first ones in the order."""
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
        """Start to drop `num_short` entries of sessions that give way to that one (None: all)."""
        if num_short > 0:
            rule = _Rule(Tier.SSD, may_cut=True)
            self._apply(self._plan(rule, num_short, self._victims(Tier.SSD, giving_way_to)), rule)

    def make_quota(self, tenant: str, num_wanted: int) -> bool:
        """Have a tenant's own sessions give way to its next blocks, if its quota asks for it.

        Returns:
            Whether it may have `num_wanted` more blocks now.
        """
        tenants = self._state.tenants
        order = tenants.order_of(tenant)
        if order is None or not tenants.may_ever_have(tenant, num_wanted):
            return order is None  # nobody goes for what cannot be
        num_over = tenants.num_over(tenant, num_wanted)
        if num_over:
            rule = _Rule(None, may_cut=True)
            self._apply(self._plan(rule, num_over, order), rule)
        return not tenants.num_over(tenant, num_wanted)

    def drop_victim(self) -> bool:
        """Drop the first session in order of eviction that is neither leased, pinned nor busy.

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
        """Yield what to do in DRAM in turn, until there is room."""
        yield _Rule(Tier.DRAM, may_cut)
        if self._state.placement.has_busy:
            yield _Rule(Tier.DRAM, may_cut, may_take_running=True)

    def _plan(self, rule: _Rule, num_wanted: int, order: Iterable[SessionKey]) -> _Plan:
        """Plan what to take of the sessions in this order."""
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
        """Plan blocks of one session, tail first; returns whether it has no more in the tier."""
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
                may_cut = may_cut and block.may_vanish()  # never cut before a block that is in use
        return is_emptied

    # -------------------------------------------------------------------------------------- taking

    def _apply(self, plan: _Plan, rule: _Rule) -> None:
        state = self._state
        counter = f"evictions_{rule.tier.value if rule.tier else 'quota'}"
        if rule.tier is not None:
            self._observe_rest(plan, rule.tier)
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
                self._left(key, rule.tier)
        if rule.tier is Tier.DRAM:
            for key in filter(state.placement.queue.is_queued, plan.passed):
                state.placement.prefetching.reopen(key)  # what goes is to be read again in time
        state.outbox.count(counter, len(plan.blocks))
        for block in reversed(plan.blocks):  # heads first: a session is cut once, where it ends
            if _is_in(block, rule.tier):  # else an earlier cut took it along
                self._take(block, rule.tier)

    def _observe_rest(self, plan: _Plan, tier: Tier) -> None:
        """Record how long the sessions rested that are about to leave the tier."""
        state = self._state
        for key in plan.emptied:
            last_access_ns = state.sessions[key].last_access_ns
            state.histograms.on_evict(key, tier, last_access_ns, state.now_ns)

    def _take(self, block: Block, tier: Tier | None) -> None:
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

    def _left(self, key: SessionKey, tier: Tier) -> None:
        """Record that a session has nothing more to give in the tier."""
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
    """Whether the block is lost when it leaves the tier."""
    return tier is None or not block.resides(Tier.SSD if tier is Tier.DRAM else Tier.DRAM)
