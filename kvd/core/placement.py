"""Making room: which sessions give up which blocks, in which tier.

Pure. The policy ranks sessions; here their blocks are taken, coldest session first, tail first, so
that what remains is a prefix. Rules:
1. a block that a warmer session uses too stays with that session (D5: a victim that frees nothing
   is skipped);
2. a block that is read, moved or built on stays; a hard-pinned session's blocks stay;
3. in DRAM clean blocks go first. Dirty ones go, and their sessions are cut there, only when the
   writer says that SSD cannot take them (`Writer.make_slots`);
4. a queued session's blocks go only when nothing else does, and a soft-pinned one's after those;
5. for a tenant's quota only its own sessions go, from all tiers, and no leased or queued one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.core.block import Block, BlockIo
from kvd.core.records import Pin, Tier
from kvd.core.session import Session
from kvd.core.state import CacheState
from shared.session_key import SessionKey

EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class _Rule:
    """What one pass may take."""

    tier: Tier | None  # None: from all
    may_cut: bool  # take the last copy of a block
    may_take_queued: bool = False
    may_take_soft_pinned: bool = False
    stop_at: SessionKey | None = None  # this session and warmer ones are no victims


@dataclass(slots=True)
class _Plan:
    """What one pass takes, and the sessions that then have nothing more to give in the tier."""

    blocks: list[Block] = field(default_factory=list)
    folded: list[tuple[Session, int]] = field(default_factory=list)  # that many of its last ones
    emptied: list[SessionKey] = field(default_factory=list)
    num_taken: int = 0  # folded blocks included


class Placement:
    """Makes room in the tiers of one cache state."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def evict(self, num_wanted: int, *, may_cut: bool) -> int:
        """Evict until `num_wanted` slots are free, as far as possible; returns how many are.

        Dirty blocks go only if `may_cut`.
        """
        for rule in self._rules(Tier.DRAM, may_cut=may_cut):
            num_short = num_wanted - self._state.slots.num_free
            if not may_cut:  # else an arena full of dirty blocks is looked through in vain
                num_short = min(num_short, self._num_clean())
            if num_short > 0:
                self._apply(self._plan(rule, num_short), rule)
        return self._state.slots.num_free

    def _num_clean(self) -> int:
        """Blocks in DRAM that are on SSD too; those being read and leased ones are among them."""
        return self._state.blocks.num_dram - self._state.blocks.num_dirty

    def coldest_dirty(self, num_wanted: int) -> list[Block]:
        """Name the dirty blocks that would be cut next, if room had to be made so."""
        blocks: list[Block] = []
        for rule in self._rules(Tier.DRAM, may_cut=True):
            if len(blocks) < num_wanted:
                blocks = self._plan(rule, num_wanted).blocks
        return [block for block in blocks if block.dirty]

    def make_extents(self, num_short: int, warmest: SessionKey | None) -> None:
        """Start to drop `num_short` rows of sessions colder than `warmest`, as far as possible."""
        for rule in self._rules(Tier.SSD, may_cut=True, stop_at=warmest):
            if num_short > 0:
                num_drops = len(self._state.drops)
                self._apply(self._plan(rule, num_short), rule)
                num_short -= len(self._state.drops) - num_drops

    def make_quota(self, tenant: str, num_wanted: int) -> bool:
        """Have a tenant's coldest sessions give way to its next blocks, if its quota asks for it.

        Returns:
            Whether it may have `num_wanted` more blocks now.
        """
        tenants = self._state.tenants
        order = tenants.order_of(tenant)
        if order is None or not tenants.may_ever_have(tenant, num_wanted):
            return order is None  # nobody goes for what cannot be
        for may_take_soft_pinned in (False, True):
            num_over = tenants.num_over(tenant, num_wanted)
            if num_over:
                rule = _Rule(None, may_cut=True, may_take_soft_pinned=may_take_soft_pinned)
                self._apply(self._plan(rule, num_over, order), rule)
        return not tenants.num_over(tenant, num_wanted)

    def drop_coldest(self) -> bool:
        """Drop the coldest session that nobody leases, pins or queues; returns if there was one."""
        state = self._state
        for key in state.placement.victims(None, state.now_ns):
            if not state.leases.num_of_session(key) and not state.placement.queue.is_queued(key):
                state.outbox.count("sessions_dropped")
                state.cut(state.sessions[key], 0, EVICTED)
                return True
        return False

    # ------------------------------------------------------------------------------------ planning

    def _rules(
        self, tier: Tier, *, may_cut: bool, stop_at: SessionKey | None = None
    ) -> Iterable[_Rule]:
        """What to do in turn, until there is room."""
        yield _Rule(tier, may_cut, stop_at=stop_at)
        yield _Rule(tier, may_cut, may_take_queued=True, stop_at=stop_at)
        if self._state.num_pins[Pin.SOFT]:
            yield _Rule(
                tier, may_cut, may_take_queued=True, may_take_soft_pinned=True, stop_at=stop_at
            )

    def _plan(
        self, rule: _Rule, num_wanted: int, order: Iterable[SessionKey] | None = None
    ) -> _Plan:
        """Plan what to take of the sessions in the order, which is the tier's by default."""
        state = self._state
        plan = _Plan()
        passed: set[SessionKey] = set()
        for key in state.placement.victims(rule.tier, state.now_ns) if order is None else order:
            session = state.sessions[key]
            if key == rule.stop_at:
                break
            if session.pin is Pin.SOFT and not rule.may_take_soft_pinned:
                break  # all that follow are
            if not self._is_victim(key, rule):
                continue
            passed.add(key)
            if self._take_from(session, rule, passed, plan, num_wanted):
                plan.emptied.append(key)
            if plan.num_taken >= num_wanted:
                break
        return plan

    def _is_victim(self, key: SessionKey, rule: _Rule) -> bool:
        if self._state.placement.queue.is_queued(key) and not rule.may_take_queued:
            return False
        return rule.tier is not None or not self._state.leases.num_of_session(key)

    def _take_from(
        self, victim: Session, rule: _Rule, passed: set[SessionKey], plan: _Plan, num_wanted: int
    ) -> bool:
        """Plan blocks of one session, tail first; returns whether it has no more in the tier."""
        is_emptied = True
        if victim.folded and rule.tier is not Tier.DRAM:
            num_folded = min(victim.num_folded, num_wanted - plan.num_taken)
            plan.folded.append((victim, num_folded))
            plan.num_taken += num_folded
            is_emptied = num_folded == victim.num_folded
        may_cut = rule.may_cut
        for block_key in reversed(victim.block_keys()):
            if plan.num_taken >= num_wanted:
                return False
            block = self._state.blocks[block_key]
            if not _is_in(block, rule.tier) or self._is_covered(block, rule.tier, passed):
                continue
            if self._may_take(block, rule, may_cut=may_cut):
                plan.blocks.append(block)
                plan.num_taken += 1
            else:
                is_emptied = False
                may_cut = may_cut and block.may_vanish()  # never cut before a block that is in use
        return is_emptied

    def _is_covered(self, block: Block, tier: Tier | None, passed: set[SessionKey]) -> bool:
        """Whether the block stays with a session that is pinned or comes later in the order."""
        sessions, policy = self._state.sessions, self._state.policy

        def is_warmer(key: SessionKey) -> bool:
            if sessions[key].pin is Pin.HARD:
                return True
            return key not in passed and (tier is None or policy.ranks(key, tier))

        return self._state.warm_user(block, is_warmer)

    def _may_take(self, block: Block, rule: _Rule, *, may_cut: bool) -> bool:
        if not rule.may_take_queued and self._state.warm_user(
            block, self._state.placement.queue.is_queued
        ):
            return False
        if _is_last_copy(block, rule.tier):
            return may_cut and block.may_vanish()
        return block.io is BlockIo.IDLE and (rule.tier is Tier.SSD or not block.readers)

    # -------------------------------------------------------------------------------------- taking

    def _apply(self, plan: _Plan, rule: _Rule) -> None:
        state = self._state
        counter = f"evictions_{rule.tier.value if rule.tier else 'quota'}"
        for session, num_folded in plan.folded:
            state.outbox.count(counter, num_folded)
            num_sessions = len(state.sessions)
            state.cut_folded(session, num_folded, EVICTED)
            state.outbox.count("sessions_dropped", num_sessions - len(state.sessions))
        if rule.tier is not None:
            for key in plan.emptied:
                self._left(key, rule.tier)
        for block in plan.blocks:
            if not _is_in(block, rule.tier):
                continue  # an earlier cut took it along
            state.outbox.count(counter)
            if _is_last_copy(block, rule.tier):
                state.outbox.count("sessions_dropped", state.cut_users(block, EVICTED))
            elif rule.tier is Tier.DRAM:
                state.leave_dram(block)
            else:
                state.leave_ssd(block)

    def _left(self, key: SessionKey, tier: Tier) -> None:
        """Note that a session has nothing more to give in the tier."""
        if key in self._state.sessions:
            self._state.policy.left(key, tier)
            if tier is Tier.DRAM:
                self._state.fold_later(key)


def _is_in(block: Block, tier: Tier | None) -> bool:
    return any(map(block.resides, Tier)) if tier is None else block.resides(tier)


def _is_last_copy(block: Block, tier: Tier | None) -> bool:
    """Whether the block is lost when it leaves the tier."""
    return tier is None or not block.resides(Tier.SSD if tier is Tier.DRAM else Tier.DRAM)
