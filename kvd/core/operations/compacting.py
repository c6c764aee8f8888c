"""Compaction: copy the tokens that discards have left of a session into dense blocks.

A discard frees only the blocks that it empties. Scattered discards leave blocks of which little is
used, and spans of few tokens. When much space is lost in this way, and the session has not been
used for a while, its KV is copied together.

Pure: the performer does the copying (CompactTokens). One run goes through three phases:

    COPYING      the performer verifies the sources, copies their KV to new slots and hashes these
    WRITING      the new blocks are being written to SSD; only if any source is there
    COMMITTING   the session has the new spans; the old blocks stay until its entry is committed

Invariants:
1. committed slots never change, and shared blocks are never touched;
2. a kvd that starts after a crash finds the old spans or the new ones, whole, in the tiers they
   were in: new slots are in the journal only once they are hashed, new blocks are on SSD before
   their session's entry names them, and old blocks go only after that entry is durable;
3. a lease or turn that comes before the session has its new spans takes precedence: the run is
   cancelled, and tried again later. So it is when anything else changes those spans;
4. there is one run at a time, of MAX_RUN_BYTES at most. It evicts nothing that is needed sooner,
   and takes no slot of the watermark.
"""

from dataclasses import dataclass

from kvd.core.io.placement import Placement
from kvd.core.io.verifying import Verifier
from kvd.core.io.writing import Writer
from kvd.core.operations.compaction_plan import (
    copy_action,
    is_pending,
    is_wasteful,
    plan_compaction,
)
from kvd.core.records.actions import SESSION_COMPACTED, CommitIndex, IoOutcome
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIo
from kvd.core.state.cache_state import CacheState
from kvd.core.state.compaction_run import Compaction, Phase, Plan, Target
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey
from shared.types.units import MIB, NS_PER_S

MAX_RUN_BYTES = 64 * MIB  # of new blocks in one run: some ten milliseconds of copying
RETRY_NS = NS_PER_S  # after a session was in use, or a run was cancelled
LOOK_BATCH = 16  # sessions looked at per call, so that one call stays short


@dataclass(slots=True)
class _Work:
    """The session that is being compacted, run by run.

    Attributes:
        session: the session.
        num_discards: its number of discards when the work began: later ones invalidate it.
        first: index of the first span that is not looked at yet.
        offset: token position of that span.
    """

    session: Session
    num_discards: int
    first: int = 0
    offset: int = 0


class Compactor:
    """Compacts sessions of one cache state.

    Attributes:
        resting: sessions that were discarded from, and the times at which to look at them: call
            `look` when the first one is due.
    """

    def __init__(
        self, state: CacheState, placement: Placement, writer: Writer, verifier: Verifier
    ) -> None:
        self._state = state
        self._placement = placement
        self._writer = writer
        self._verifier = verifier
        self.resting = state.make_clock()
        self._waiting = state.wasteful
        self._work: _Work | None = None
        self._no_room_at: int | None = None  # Outbox.num_freed when there was no room
        self._is_stopped = self._is_over = False

    def consider(self, key: SessionKey) -> None:
        """Schedule a look at a session that was used, if it has discards."""
        session = self._state.sessions.get(key)
        if session is None or self._state.limits.max_waste >= 1:
            return
        if self._state.layout.state_bytes:
            return  # with states a discard leaves a prefix, which has no holes
        if session.lineage is None or session.lineage.is_whole:
            return
        self._is_stopped = False
        self.resting.schedule(key, self._state.now_ns + self._state.limits.compact_rest_ns)

    def look(self) -> None:
        """Queue those of the due sessions that waste much; a bounded number per call."""
        state = self._state
        for _ in range(LOOK_BATCH):
            key = self.resting.pop_due(state.now_ns)
            if key is None:
                return
            session = state.sessions.get(key)
            if session is None:
                continue
            rests_until_ns = session.last_access_ns + state.limits.compact_rest_ns
            if self._is_in_use(key):
                self.resting.schedule(key, state.now_ns + RETRY_NS)
            elif rests_until_ns > state.now_ns:
                self.resting.schedule(key, rests_until_ns)
            elif is_wasteful(state, session):
                self._waiting[key] = None

    def resume(self) -> None:
        """Continue the run under way, or begin one; called when no other call is in progress."""
        state = self._state
        if state.compaction is not None:
            if state.compaction.phase is Phase.WRITING:
                self._follow_writes(state.compaction)
            return
        while self._waiting and self._may_begin():
            self._begin(next(iter(self._waiting)))

    def stop(self, *, for_good: bool = False) -> None:
        """Begin no runs until a session is considered again, because the arena is being emptied.

        With `for_good`, begin none at all any more: kvd shuts down.
        """
        self._is_stopped = True
        self._is_over |= for_good
        run = self._state.compaction
        if run is not None and run.phase is Phase.WRITING:
            self._cancel(run)

    # --------------------------------------------------------------------------------- completions

    def copy_done(self, op_id: int, outcome: IoOutcome, checksums: list[bytes]) -> None:
        """Take the outcome of a CompactTokens, and the checksums of each new block.

        CORRUPT means that a source is not what was stored: the copies of it are worthless.
        """
        state, run = self._state, self._state.compaction
        assert run is not None and run.op_id == op_id, "one run is under way"  # noqa: PT018
        for block in run.sources:
            block.move("compact_done")
        if outcome is IoOutcome.OK and self._is_unchanged(run):
            self._make_blocks(run, checksums)
            self._write(run)
        else:
            for target in run.targets:
                self._free(run, target)
            if outcome is IoOutcome.CORRUPT:
                self._verify_again(run.sources)
            self._cancel(run)
        for block in run.sources:
            state.settle(block)
            if block.users:
                self._writer.admit(block)
        state.outbox.on_space_freed()

    def commit_done(self, op_id: int) -> None:
        """Take the completion of a CommitIndex: the session's new entry is durable."""
        run = self._state.compaction
        assert run is not None and run.op_id == op_id, "one run is under way"  # noqa: PT018
        self._state.compaction = None
        for block in run.sources:
            block.holders -= 1
            self._state.settle(block)
        self._state.outbox.on_space_freed()

    # --------------------------------------------------------------------------------------- begin

    def _is_in_use(self, key: SessionKey) -> bool:
        state = self._state
        return bool(state.leases.num_of_session(key)) or state.placement.is_busy(key)

    def _may_begin(self) -> bool:
        """Whether no run is under way, and space was freed since the last one found no room."""
        state = self._state
        has_room = self._no_room_at != state.outbox.num_freed
        return state.compaction is None and has_room and not self._is_stopped

    def _begin(self, key: SessionKey) -> None:
        """Begin the next run of a session; or drop it from the queue; or rest for lack of room."""
        work = self._find_work(key)
        if work is None or self._is_over:
            del self._waiting[key]
            return
        if self._is_in_use(key):
            del self._waiting[key]
            self.resting.schedule(key, self._state.now_ns + RETRY_NS)
            return
        plan = self._plan(work, max(1, MAX_RUN_BYTES // self._state.layout.block_bytes))
        if plan is None or self._is_over_quota(key, len(plan.dense)):
            del self._waiting[key]
            if plan is None and is_pending(self._state, work.session):
                self._work = None  # later again, from the first span on
                self.resting.schedule(key, self._state.now_ns + RETRY_NS)
            return
        num_slots = self._make_room(key, len(plan.dense))
        if num_slots != len(plan.dense):
            plan = self._plan(work, num_slots) if num_slots else None
        if plan is None:
            self._no_room_at = self._state.outbox.num_freed
            return
        self._start(key, plan)

    def _find_work(self, key: SessionKey) -> _Work | None:
        """Return the work on a session, new if it has changed; None if it is gone."""
        session = self._state.sessions.get(key)
        if session is None:
            return None
        work = self._work
        if work is None or work.session is not session or work.num_discards != session.num_discards:
            work = self._work = _Work(session, session.num_discards)
        return work

    def _plan(self, work: _Work, max_blocks: int) -> Plan | None:
        return plan_compaction(self._state, work.session, work.first, work.offset, max_blocks)

    def _is_over_quota(self, key: SessionKey, num_blocks: int) -> bool:
        tenants = self._state.tenants
        has_quota = tenants.order_of(key.tenant) is not None
        return has_quota and bool(tenants.num_over(key.tenant, num_blocks))

    def _make_room(self, key: SessionKey, num_blocks: int) -> int:
        """Make room for a run; returns how many slots above the watermark are free for it."""
        state = self._state
        num_short = num_blocks - (state.slots.num_free - state.num_kept_free)
        self._placement.evict_for(key, num_short)
        return max(0, min(num_blocks, state.slots.num_free - state.num_kept_free))

    def _start(self, key: SessionKey, plan: Plan) -> None:
        """Allocate the slots of a plan and issue the copying."""
        state = self._state
        spans = [span for dense in plan.dense for span in dense.sources]
        sources = [state.blocks[k] for k in dict.fromkeys(span.block_key for span in spans)]
        targets = [Target(dense, *state.slots.allocate()) for dense in plan.dense]
        run = Compaction(state.under_way.next_op_id(), key, plan, sources, targets)
        state.compaction = run
        state.tenants.charge(key.tenant, len(targets))
        for block in sources:
            block.move("copy")
        state.outbox.add(copy_action(state, run))

    # ----------------------------------------------------------------------------- later phases

    def _is_unchanged(self, run: Compaction) -> bool:
        """Whether the session still has the spans of the plan, and is not in use."""
        session, plan = self._state.sessions.get(run.key), run.plan
        if session is None or self._is_in_use(run.key) or self._is_stopped:
            return False
        spans = session.spans[plan.first : plan.first + len(plan.old)]
        return list(spans) == plan.old and all(map(self._state.blocks.holds, run.sources))

    def _make_blocks(self, run: Compaction, checksums: list[bytes]) -> None:
        """Make blocks of the filled slots; where a block exists meanwhile, use that one."""
        state = self._state
        for target, block_checksums in zip(run.targets, checksums, strict=True):
            span = target.dense.span
            block = state.find_block(span.block_key)
            if block is not None:
                self._free(run, target)
            else:
                block = Block(span.block_key, span.num_tokens, run.key.tenant)
                state.slots.commit(target.slot_id)
                state.blocks.add(block)
                state.blocks.enter_dram(block, target.slot_id, target.generation)
                state.blocks.set_contents(block, target.dense.token_ids, block_checksums)
                block.last_user = run.key
                state.journal.put_block(block)
            block.holders += 1
            run.new_blocks.append(block)
        run.targets = []

    def _write(self, run: Compaction) -> None:
        """Queue the new blocks for SSD if any old one is there; else replace the spans at once."""
        run.phase = Phase.WRITING
        if any(block.resides(Tier.SSD) for block in run.sources):
            for block in run.new_blocks:
                self._writer.admit(block, was_queued=True)
        else:
            self._replace(run)

    def _follow_writes(self, run: Compaction) -> None:
        """Replace the spans once all new blocks are on SSD; cancel the run if one is refused."""
        if not self._is_unchanged(run):
            self._cancel(run)
            return
        state = self._state
        first = next((block for block in run.new_blocks if not block.resides(Tier.SSD)), None)
        if first is None:
            self._replace(run)
        elif state.ssd_degraded or not (
            state.unwritten.holds(first) or first.io is BlockIo.WRITING
        ):
            self._cancel(run)  # refused: there is no extent, or none that this session may take

    def _replace(self, run: Compaction) -> None:
        """Give the session its new spans, and keep the old blocks until its entry is durable."""
        state, plan = self._state, run.plan
        session = state.sessions[run.key]
        for block in run.sources:
            block.holders += 1
        end = plan.first + len(plan.old)
        spans = [*session.spans[: plan.first], *plan.new, *session.spans[end:]]
        state.discarded.before_discard(session, spans)  # remembered as misses "discarded"
        state.set_spans(session, spans)
        for block in run.new_blocks:
            block.holders -= 1
            state.settle(block)
        run.phase, run.op_id = Phase.COMMITTING, state.under_way.next_op_id()
        state.outbox.index.put_session(run.key, behind_blocks=True)
        state.outbox.index.add(CommitIndex(run.op_id))
        assert self._work is not None, "a run is part of work on its session"
        self._work.first, self._work.offset = plan.first + len(plan.new), plan.end_offset
        self._record(run, session)

    def _record(self, run: Compaction, session: Session) -> None:
        """Count and report a run whose session has its new spans."""
        outbox = self._state.outbox
        num_tokens = sum(block.num_tokens for block in run.new_blocks)
        outbox.count("compactions")
        outbox.count("compacted_tokens", num_tokens)
        outbox.count("compacted_blocks", len(run.new_blocks))
        fields = {
            "num_tokens": num_tokens,
            "num_blocks": len(run.new_blocks),
            "num_blocks_before": len(run.sources),
            "num_spans": session.num_spans,
        }
        outbox.emit(SESSION_COMPACTED, run.key, fields)
        num_blocks = len(run.new_blocks)
        self._state.record_move(
            run.key, MoveKind.COMPACTED, num_blocks=num_blocks, num_tokens=num_tokens
        )

    # ------------------------------------------------------------------------------------- the end

    def _cancel(self, run: Compaction) -> None:
        """End the run, drop its new blocks, and try again later; the session is unchanged."""
        state = self._state
        state.compaction = None
        self._work = None
        for block in run.new_blocks:
            block.holders -= 1
            state.settle(block)
        state.outbox.count("compactions_given_up")
        if self._waiting.pop(run.key, self) is None:
            self.resting.schedule(run.key, state.now_ns + RETRY_NS)
        state.outbox.on_space_freed()

    def _free(self, run: Compaction, target: Target) -> None:
        self._state.free_slot(target.slot_id)
        self._state.tenants.charge(run.key.tenant, -1)

    def _verify_again(self, sources: list[Block]) -> None:
        """Verify all sources, as one of them is corrupt."""
        for block in sources:
            if self._state.blocks.holds(block) and block.slot_id is not None and block.checksums:
                self._verifier.start(block, urgent=False)
