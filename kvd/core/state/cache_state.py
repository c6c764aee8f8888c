"""The tables of one cache engine, and the transitions that several of its parts share.

Pure. The parts (loading, storing, writing, placement and so on) hold a reference to the state and
call these methods. Nothing else changes a block's places or a session's spans.

Invariants (checking.py states them as code):
1. a session names only blocks of the index, and each such block names the session among its users;
2. a block that is not needed and has no operation under way is not in the index;
3. a block with bytes in a tier has a user that is pinned or ranks in that tier's order, or no user
   at all.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvd.core.eviction.policy import PolicyMaker
from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.eviction.ttl import TtlClock
from kvd.core.records.actions import (
    SESSION_CUT,
    SESSION_DROPPED,
    SESSION_EXPIRED,
    SESSION_FLUSHED,
    DropBlock,
)
from kvd.core.records.entries import Pin, Span
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block, BlockIndex, BlockIo
from kvd.core.state.block_users import BlockUsers
from kvd.core.state.discarded_blocks import DiscardedBlocks
from kvd.core.state.extents import ExtentTable
from kvd.core.state.leases import LeaseTable
from kvd.core.state.limits import Limits
from kvd.core.state.outbox import CacheHistograms, Outbox
from kvd.core.state.packed_tails import PackedTails
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind, SessionHistory
from kvd.core.state.slots import Journal, SlotTable
from kvd.core.state.stored_parts import PartsTable, whole_prefix, without_parts
from kvd.core.state.tenants import TenantTable
from kvd.core.state.turn_log import TurnLog
from kvd.core.state.under_way import UnderWay, WriteQueue
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey

if TYPE_CHECKING:
    from kvd.core.state.compaction_run import Compaction

_DROPS = {
    SESSION_DROPPED: MoveKind.DROPPED,
    SESSION_EXPIRED: MoveKind.EXPIRED,
    SESSION_FLUSHED: MoveKind.FLUSHED,
}


class CacheState:
    """All tables of one cache engine, and the transitions that keep them consistent.

    Attributes:
        layout: what a block looks like; `shape`: how one lies on SSD.
        blocks, slots, extents, journal: where the bytes are. Changed by the transitions below, by
            the reader and the writer, and by what makes blocks: stores, compactions, recovery.
        sessions, users, tails: which session uses which blocks. Changed by the transitions below.
        placement, policy, tenants: the orders in which sessions are evicted and prefetched.
        stored_parts: states or windows, changed by the same transitions. None if the layout has
            neither.
        leases: which engines may use slots. Changed by loads, stores, attaching and detaching.
        under_way, unwritten: operations of the performer, and the writes that wait to be issued.
        unverified: adopted blocks whose verification has not begun, in the order of verification.
        discarded: blocks that were removed because their tokens were discarded.
        wasteful: sessions that wait to be compacted; `compaction`: the run under way.
        scrubbed: operation of the scrub that checks a slot or extent, by tier and slot or extent.
        ttl, retention: clocks made by `make_clock`, for the TTLs and the retentions of sessions.
        mean_store_blocks: mean number of blocks for which a store needs slots.
        num_pins: number of pinned sessions, by kind of pin; num_retained: of retained sessions.
        ssd_degraded: why writes are held back; "" if they are not.
        outbox, histograms, history, turns: what is emitted, counted and recorded.
        now_ns: time of the current call.
    """

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        salt_of: Callable[[str], bytes],
        make_policy: PolicyMaker,
    ) -> None:
        self.layout = layout
        self.shape = ExtentShape(layout)
        self.limits = limits
        self.salt_of = salt_of
        self.blocks = BlockIndex()
        self.sessions: dict[SessionKey, Session] = {}
        self.slots = SlotTable(limits.num_slots)
        self.extents = ExtentTable(limits.num_extents, self.shape.sectors_per_extent)
        self.leases = LeaseTable(limits.max_leases)
        self.placement = SessionPlacement(
            make_policy, self._capacity_bytes, has_ssd=limits.num_extents > 0
        )
        self.policy = self.placement.policy
        self.users = BlockUsers(self.blocks, self.sessions, self.policy)
        self.tails = PackedTails(
            self.blocks, self.sessions, self.users.add, packs_sessions=limits.packs_sessions
        )
        self.stored_parts = PartsTable() if layout.part_slots else None
        self._clocks: list[TtlClock] = []
        self.ttl = self.make_clock()
        self.retention = self.make_clock()
        self.turns = TurnLog(limits.max_turns)
        self.outbox = Outbox(self.sessions)
        self.histograms = CacheHistograms()
        self.under_way = UnderWay()
        self.compaction: Compaction | None = None
        self.unverified: OrderedDict[bytes, Block] = OrderedDict()
        self.unwritten = WriteQueue(self.shape, self.extents)
        self.mean_store_blocks = 0.0
        self.journal = Journal()
        self.scrubbed: dict[tuple[Tier, int], int] = {}
        self.discarded = DiscardedBlocks(self.blocks)
        self.wasteful: OrderedDict[SessionKey, None] = OrderedDict()
        self.tenants = TenantTable(limits.tenant_limits, layout.block_bytes)
        self.history = SessionHistory()
        self.num_pins = dict.fromkeys((Pin.SOFT, Pin.HARD), 0)
        self.num_retained = 0
        self.ssd_degraded = ""
        self.now_ns = 0

    def _capacity_bytes(self) -> int:
        return (len(self.slots) + len(self.extents)) * self.layout.block_bytes

    @property
    def num_kept_free(self) -> int:
        """Number of slots that the watermark keeps free."""
        return int(self.limits.watermark * len(self.slots))

    @property
    def prefetch_window(self) -> int:
        """The paper's L_pw in requests: mean sessions that fit in the slots for reads."""
        num_slots = len(self.slots) - self.num_kept_free
        return self.placement.window(num_slots * self.layout.block_bytes)

    def advance(self, now_ns: int) -> None:
        """Set the time of the current call. Time never goes backwards (D17)."""
        self.now_ns = max(self.now_ns, now_ns)

    def is_cleaning(self) -> bool:
        """Whether dirty blocks will become clean, or become writable, without further calls."""
        ops, index = self.under_way, self.outbox.index
        is_busy = ops.hashes or ops.verifies or ops.writes or ops.wipes or self.compaction
        return bool(is_busy or (len(self.unwritten) and (ops.drops or index.is_far_behind)))

    # ------------------------------------------------------------------------------------ sessions

    def make_clock(self) -> TtlClock:
        """Make a clock for deadlines of sessions. A dropped session is removed from it at once."""
        clock = TtlClock()
        self._clocks.append(clock)
        return clock

    def add_session(self, session: Session) -> None:
        """Register a new session. The caller then sets its spans, and enters it in the orders."""
        self.sessions[session.key] = session
        self.tenants.count_session(session.key.tenant, 1)
        self.count_pin(session, 1)

    def count_pin(self, session: Session, increment: int) -> None:
        """Count a session among the pinned ones, if it is pinned."""
        if session.pin is not Pin.NONE:
            self.num_pins[session.pin] += increment

    def touch(self, session: Session) -> None:
        """Record a use of the session: O(its blocks)."""
        session.last_access_ns = self.now_ns
        session.num_read_ahead = 0
        session.came_back |= bool(session.awaited_tools)
        session.awaited_tools = ()
        session.superseded = session.near_eviction = False
        if session.ended:
            session.ended = False
            self.outbox.index.put_session(session.key)
        if session.pin is not Pin.HARD:
            self.users.on_access(session, self.now_ns)
            self.tenants.on_access(session.key)
        self.blocks.set_last_user(session.spans, session.key)
        self.schedule_expiry(session)

    def inherited_ttl_ns(self, tenant: str) -> int | None:
        """TTL of a tenant's sessions that have none of their own: the tenant's, or the default."""
        ttl_ns = self.tenants.limits(tenant).ttl_ns
        return self.limits.default_ttl_ns if ttl_ns is None else ttl_ns

    def expires_at_ns(self, session: Session) -> int | None:
        """Return when the session's TTL passes; None: never."""
        return session.expires_at_ns(self.inherited_ttl_ns(session.key.tenant))

    def schedule_expiry(self, session: Session) -> None:
        """Set the session's deadline in the TTL clock."""
        self.ttl.schedule(session.key, self.expires_at_ns(session))

    def retain(self, session: Session, retain_ns: int | None) -> None:
        """Protect a session from eviction for `retain_ns` after each use; None ends its retention.

        A retained session is evicted only when nothing else is left to evict. A shorter TTL still
        expires it. O(log sessions).
        """
        if retain_ns == session.retain_ns:
            return
        self.num_retained += (retain_ns is not None) - (session.retain_ns is not None)
        session.retain_ns = retain_ns
        self.retention.schedule(session.key, session.retained_until_ns)
        self.outbox.index.put_session(session.key)
        if session.pin is not Pin.HARD:
            self.policy.guard(session.key, session.guard)
            self.tenants.guard(session.key, session.guard)

    def set_spans(self, session: Session, spans: Sequence[Span]) -> None:
        """Replace a session's spans. Blocks that lose their last user are removed."""
        self.tails.unpack(session)
        if self.stored_parts is not None:
            self.stored_parts.replace(session.key, session.spans, spans)
        before = session.block_keys()
        session.spans = list(spans)
        self.outbox.on_fetch_end(session.key)
        after = session.block_keys()
        self.outbox.index.put_session(session.key)
        self.users.add(session, (self.blocks[key] for key in after if key not in before))
        for block_key in reversed(before):  # tail first: what is left is a prefix at any moment
            if block_key not in after:
                block = self.blocks[block_key]
                self.users.remove(session, block)
                self.settle(block)
                if len(block.users) == 1:  # it is private now, and so may be packed
                    self.tails.pack_later(block.newest_user())

    def cut(self, session: Session, num_spans: int, why: str) -> None:
        """Keep only the first spans, and no packed block. A session left empty is dropped."""
        if num_spans == 0:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        num_lost = session.num_spans - num_spans
        self._drop_packed(session, session.num_packed)
        self.set_spans(session, whole_prefix(session.spans, num_spans))
        self._record_cut(session, num_lost, why)

    def cut_packed(self, session: Session, num_blocks: int, why: str) -> None:
        """Drop the session's last packed blocks. A session left empty is dropped."""
        if not session.spans and num_blocks == session.num_packed:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        if self.stored_parts is not None:  # a state or window is kept as a whole, or not at all
            self.cut(session, session.num_spans - num_blocks, why)
            return
        self._drop_packed(session, num_blocks)
        self.outbox.index.put_session(session.key)
        self._record_cut(session, num_blocks, why)

    def drop_session(self, session: Session, event: str, why: str) -> None:
        """Drop a session, and every block that no other session uses."""
        num_tokens, num_blocks = session.num_tokens, session.num_spans
        self._drop_packed(session, session.num_packed)
        del self.sessions[session.key]
        for clock in self._clocks:
            clock.forget(session.key)
        self.wasteful.pop(session.key, None)
        self.set_spans(session, ())
        self.outbox.index.drop_session(session.key, is_indexed=session.is_indexed)
        self.policy.on_remove(session.key)
        self.tenants.on_remove(session.key)
        self.tenants.count_session(session.key.tenant, -1)
        self.count_pin(session, -1)
        self.num_retained -= session.retain_ns is not None
        self.outbox.emit(event, session.key, {"why": why, "num_tokens": num_tokens})
        self.record_move(
            session.key, _DROPS[event], num_blocks=num_blocks, num_tokens=num_tokens, why=why
        )

    def record_move(
        self,
        key: SessionKey | None,
        kind: MoveKind,
        *,
        num_blocks: int = 0,
        num_tokens: int = 0,
        why: str = "",
    ) -> None:
        """Record an event of a session's KV. Without a session nothing is recorded."""
        self.history.record(
            key, kind, self.now_ns, num_blocks=num_blocks, num_tokens=num_tokens, why=why
        )

    def record_block_move(self, block: Block, kind: MoveKind, why: str = "") -> None:
        """Record what happened to a block, in the history of the session that used it last."""
        self.record_move(block.last_user, kind, num_blocks=1, num_tokens=block.num_tokens, why=why)

    def _record_cut(self, session: Session, num_blocks: int, why: str) -> None:
        session.lost = why
        self.record_move(session.key, MoveKind.CUT, num_blocks=num_blocks, why=why)
        self.outbox.emit(SESSION_CUT, session.key, {"why": why, "num_tokens": session.num_tokens})

    def cut_users(self, block: Block, why: str) -> int:
        """Cut all sessions that use a lost block, at it; return how many that dropped."""
        num_before = len(self.sessions)
        for key in tuple(block.users):
            session = self.sessions[key]
            if block.num_tokens:
                self.cut(session, session.index_of(block.key), why)
            else:  # a part of a state or window: its other parts are useless, the tokens are not
                self.tails.unpack(session)
                self.set_spans(session, without_parts(session.spans, block.key))
                self.record_move(key, MoveKind.PARTS_DROPPED, num_blocks=1, why=why)
        return num_before - len(self.sessions)

    def _drop_packed(self, session: Session, num_blocks: int) -> None:
        """Drop the session's last packed blocks, without unpacking them into blocks."""
        if self.stored_parts is not None:
            self.tails.unpack(session)  # its states and windows are found by its spans
        if not num_blocks or not session.packed:
            return
        for record in reversed(self.tails.take(session, num_blocks)):
            self.drop_entry(record.key, record.extent, record.num_tokens)
        self.tenants.charge(session.key.tenant, -num_blocks)

    # -------------------------------------------------------------------------------------- blocks

    def settle(self, block: Block) -> None:
        """Restore the invariants of a block that has lost a user, a lease or an operation.

        If it is not needed, it is removed; otherwise a user answers for it in each tier.
        """
        if not self.blocks.holds(block):
            return
        if block.users:
            block.is_discarded = False
            self.users.settle(block)
        elif not block.is_needed and block.io is BlockIo.IDLE:
            self.forget(block)

    def find_block(self, key: bytes) -> Block | None:
        """Find a block by its key, even if it is packed. Look-ups follow the content chain."""
        block = self.blocks.get(key)
        owner = self.tails.heads.get(key) if block is None else None
        if owner is not None:
            self.tails.unpack(self.sessions[owner])
            block = self.blocks[key]
        return block

    def forget(self, block: Block) -> None:
        """Remove a block from every tier and the index. A write under way then finds it gone."""
        assert block.io in (BlockIo.IDLE, BlockIo.WRITING), "a block is forgotten at rest"
        self.unwritten.forget(block)
        if block.slot_id is not None:
            self.leave_dram(block)
        if block.extent is not None:
            self.leave_ssd(block)
        self.blocks.remove(block)
        self.discarded.on_remove(block)
        if block.tenant:  # a block without one was never used, and is charged to no tenant
            self.tenants.charge(block.tenant, -1)

    def lose(self, block: Block, why: str) -> None:
        """Remove a block of which no tier has the stored bytes. Its sessions are cut there."""
        self.cut_users(block, why)
        if self.blocks.holds(block):  # a lease builds on it; completing the lease finds it gone
            self.forget(block)

    def leave_dram(self, block: Block) -> None:
        """Take the block's slot away and free it."""
        self.unverified.pop(block.key, None)
        self.outbox.count("prefetch_wasted", block.is_ahead)
        self.free_slot(self.blocks.leave_dram(block))

    def leave_ssd(self, block: Block) -> None:
        """Remove the block's entry in the index. Its extent is free once that is committed."""
        self.drop_entry(block.key, self.blocks.leave_ssd(block), block.num_tokens)

    def drop_entry(self, key: bytes, extent: int | None, num_tokens: int = 0) -> None:
        """Remove a block's entry from the index, and free its extent once that is committed."""
        op_id = self.under_way.next_op_id()
        run = None if extent is None else (extent, self.shape.num_sectors(num_tokens))
        self.under_way.drops[op_id] = run
        if extent is not None:
            self.under_way.void_relocation(extent)
            self.scrubbed.pop((Tier.SSD, extent), None)
        self.outbox.index.add(DropBlock(op_id, key))

    # --------------------------------------------------------------------------------------- slots

    def clear_slot(self, slot_id: int) -> None:
        """Record in the journal that the slot holds nothing valid."""
        if self.scrubbed:  # rarely: while a scrub is running
            self.scrubbed.pop((Tier.DRAM, slot_id), None)
        self.journal.clear(slot_id)

    def free_slot(self, slot_id: int) -> None:
        """Free a slot, in the journal too."""
        self.clear_slot(slot_id)
        self.slots.free(slot_id)
        self.outbox.on_space_freed()
