"""Making room: which sessions give up which blocks, in which tier.

Pure. The policy ranks sessions; here their blocks are taken, coldest session first, tail first, so
that what remains is a prefix. Rules:
1. a block that a warmer session uses too stays with that session (D5: a victim that frees nothing
   is skipped);
2. a block that is read, moved or built on stays; a pinned session's blocks stay;
3. in DRAM clean blocks go first. Dirty ones go, and their sessions are cut there, only when SSD
   cannot take
   them: no SSD, a degraded one, or no write under way that would make them clean;
4. a queued session's blocks go only when nothing else does.
"""

from dataclasses import dataclass, field

from kvd.core.block import Block, BlockIo
from kvd.core.records import Tier
from kvd.core.session import Session
from kvd.core.state import CacheState
from shared.session_key import SessionKey

EVICTED = "evicted"


@dataclass(frozen=True, slots=True)
class _Rule:
    """What one pass may take."""

    tier: Tier
    may_cut: bool  # take the last copy of a block
    may_take_queued: bool
    stop_at: SessionKey | None = None  # this session and warmer ones are no victims


@dataclass(slots=True)
class _Plan:
    """What one pass takes, and the sessions that then have nothing more to give in the tier."""

    blocks: list[Block] = field(default_factory=list)
    emptied: list[SessionKey] = field(default_factory=list)


class Placement:
    """Makes room in the tiers of one cache state."""

    def __init__(self, state: CacheState) -> None:
        self._state = state

    def make_slots(self, num_wanted: int) -> int:
        """Evict until `num_wanted` slots are free, as far as possible; returns how many are."""
        state = self._state
        no_ssd = not len(state.extents) or bool(state.ssd_degraded)
        for may_cut, may_take_queued in (
            (False, False),
            (False, True),
            (True, False),
            (True, True),
        ):
            num_short = num_wanted - state.slots.num_free
            if num_short <= 0 or (may_cut and (no_ssd or state.is_writing())):
                break
            rule = _Rule(Tier.DRAM, may_cut or no_ssd, may_take_queued)
            self._apply(self._plan(rule, num_short), rule)
        return state.slots.num_free

    def make_extents(self, num_short: int, warmest: SessionKey) -> None:
        """Start to drop `num_short` rows of sessions colder than `warmest`, as far as possible."""
        for may_take_queued in (False, True):
            if num_short > 0:
                rule = _Rule(
                    Tier.SSD, may_cut=True, may_take_queued=may_take_queued, stop_at=warmest
                )
                num_drops = len(self._state.drops)
                self._apply(self._plan(rule, num_short), rule)
                num_short -= len(self._state.drops) - num_drops

    def drop_coldest(self) -> bool:
        """Drop the coldest session that nobody leases, pins or queues; returns if there was one."""
        state = self._state
        for key in state.policy.victims(None):
            if not state.leases.num_of_session(key) and not state.queue.is_queued(key):
                state.outbox.count("sessions_dropped")
                state.cut(state.sessions[key], 0, EVICTED)
                return True
        return False

    # ------------------------------------------------------------------------------------ planning

    def _plan(self, rule: _Rule, num_wanted: int) -> _Plan:
        plan = _Plan()
        passed: set[SessionKey] = set()
        for key in self._state.policy.victims(rule.tier):
            if key == rule.stop_at:
                break
            if self._state.queue.is_queued(key) and not rule.may_take_queued:
                continue
            passed.add(key)
            if self._take_from(self._state.sessions[key], rule, passed, plan, num_wanted):
                plan.emptied.append(key)
            if len(plan.blocks) >= num_wanted:
                break
        return plan

    def _take_from(
        self, victim: Session, rule: _Rule, passed: set[SessionKey], plan: _Plan, num_wanted: int
    ) -> bool:
        """Plan blocks of one session, tail first; returns whether it has no more in the tier."""
        is_emptied = True
        may_cut = rule.may_cut
        for block_key in reversed(victim.block_keys()):
            if len(plan.blocks) >= num_wanted:
                return False
            block = self._state.blocks[block_key]
            if not block.resides(rule.tier) or self._is_covered(block, rule.tier, passed):
                continue
            if self._may_take(block, rule, may_cut=may_cut):
                plan.blocks.append(block)
            else:
                is_emptied = False
                may_cut = may_cut and block.may_vanish()  # never cut before a block that is in use
        return is_emptied

    def _is_covered(self, block: Block, tier: Tier, passed: set[SessionKey]) -> bool:
        """Whether the block stays with a session that is pinned or comes later in the order."""
        sessions, policy = self._state.sessions, self._state.policy

        def is_warmer(key: SessionKey) -> bool:
            return sessions[key].pinned or (key not in passed and policy.ranks(key, tier))

        return self._state.warm_user(block, is_warmer)

    def _may_take(self, block: Block, rule: _Rule, *, may_cut: bool) -> bool:
        if not rule.may_take_queued and self._state.warm_user(block, self._state.queue.is_queued):
            return False
        if _is_last_copy(block, rule.tier):
            return may_cut and block.may_vanish()
        return block.io is BlockIo.IDLE and (rule.tier is Tier.SSD or not block.readers)

    def _apply(self, plan: _Plan, rule: _Rule) -> None:
        state = self._state
        for key in plan.emptied:
            state.policy.left(key, rule.tier)
        for block in plan.blocks:
            if not block.resides(rule.tier):
                continue  # an earlier cut took it along
            state.outbox.count(f"evictions_{rule.tier.value}")
            if _is_last_copy(block, rule.tier):
                state.outbox.count("sessions_dropped", state.cut_users(block, EVICTED))
            elif rule.tier is Tier.DRAM:
                state.leave_dram(block)
            else:
                state.leave_ssd(block)


def _is_last_copy(block: Block, tier: Tier) -> bool:
    """Whether the block is lost when it leaves the tier.

    A copy in DRAM counts only if its token ids are known: without them no row can be put again.
    """
    if tier is Tier.DRAM:
        return block.dirty
    return block.slot_id is None or not block.token_ids
