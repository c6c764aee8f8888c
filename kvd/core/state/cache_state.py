"""CacheState: the tables of one cache engine, and the few transitions all its parts share.

Pure. Parts (loading, storing, writing, placement) hold the state and call these; nobody else
changes a block's places or a session's spans.

Invariants (checking.py states them as code):
1. a session names only blocks of the index, and each such block names the session among its users;
2. a block nobody wants and nothing moves is gone;
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
from kvd.core.records.records import Tier
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
    """See the module docstring.

    Attributes:
        layout: what a block looks like; `shape`: how one lies on SSD.
        blocks, slots, extents, journal: where the bytes are; changed by the transitions below, by
            the reader and the writer, and by what makes blocks: stores, compactions, recovery.
        sessions, users, tails: which session uses which blocks; changed by the transitions below.
        placement, policy, tenants: the orders in which sessions go, and come.
        stored_parts: states, or windows, where there are any, changed by the same; else None.
        leases: who may use slots; changed by loads, stores and engines that come and go.
        under_way, unwritten: what the performer does, and the writes that wait.
        unverified: adopted blocks whose verification is not begun, in the order it will be in.
        discarded: blocks that went with discarded tokens.
        wasteful: sessions that wait to be compacted; `compaction`: the run under way.
        scrubbed: slot or extent -> operation of a scrub that checks it.
        ttl, retention: deadlines of sessions, and ends of their retentions; two of the clocks that
            `make_clock` has made.
        mean_store_blocks: that a store asks slots for.
        num_pins: sessions, by how they are pinned; num_retained: those that are retained.
        ssd_degraded: why writes are held back; "": they are not.
        outbox, histograms, history, turns: what is emitted, counted and recorded.
        now_ns: time of the call under way.
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
            self.blocks, self.sessions, self.users, packs_sessions=limits.packs_sessions
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
        self.journal = Journal(self.outbox.add)
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
        """Slots of the watermark."""
        return int(self.limits.watermark * len(self.slots))

    @property
    def prefetch_window(self) -> int:
        """The paper's L_pw in requests: mean sessions in the slots that may be read into."""
        num_slots = len(self.slots) - self.num_kept_free
        return self.placement.window(num_slots * self.layout.block_bytes)

    def advance(self, now_ns: int) -> None:
        """Take the time of a call. It never goes back (D17)."""
        self.now_ns = max(self.now_ns, now_ns)

    def is_cleaning(self) -> bool:
        """Whether dirty blocks become clean, or may be written, in time."""
        ops = self.under_way
        is_busy = ops.hashes or ops.verifies or ops.writes or ops.wipes or self.compaction
        return bool(is_busy or (len(self.unwritten) and ops.drops))

    # ------------------------------------------------------------------------------------ sessions

    def make_clock(self) -> TtlClock:
        """Make a clock for deadlines of sessions; one that is dropped leaves it at once."""
        clock = TtlClock()
        self._clocks.append(clock)
        return clock

    def add_session(self, session: Session) -> None:
        """Take a new session in; its spans, and a place in the orders, are to follow."""
        self.sessions[session.key] = session
        self.tenants.count_session(session.key.tenant, 1)
        self.count_pin(session, 1)

    def count_pin(self, session: Session, increment: int) -> None:
        """Count a session among the pinned ones, if it is one."""
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
            self.outbox.index.session_changed(session.key)
        if session.pin is not Pin.HARD:
            self.users.on_access(session, self.now_ns)
            self.tenants.on_access(session.key)
        for span in session.spans:
            self.blocks[span.block_key].last_user = session.key
        self.schedule_expiry(session)

    def inherited_ttl_ns(self, tenant: str) -> int | None:
        """TTL of a tenant's sessions that have none of their own: the tenant's, or the default."""
        ttl_ns = self.tenants.limits(tenant).ttl_ns
        return self.limits.default_ttl_ns if ttl_ns is None else ttl_ns

    def expires_at_ns(self, session: Session) -> int | None:
        """Return when the session's TTL passes; None for never."""
        return session.expires_at_ns(self.inherited_ttl_ns(session.key.tenant))

    def schedule_expiry(self, session: Session) -> None:
        """Have the TTL clock look at the session in time."""
        self.ttl.schedule(session.key, self.expires_at_ns(session))

    def retain(self, session: Session, retain_ns: int | None) -> None:
        """Keep a session from eviction for so long after each use; None: no longer, which is none.

        It is a wish beside others: what is retained goes when nothing else is left, and a TTL that
        is shorter holds. O(log sessions).
        """
        if retain_ns == session.retain_ns:
            return
        self.num_retained += (retain_ns is not None) - (session.retain_ns is not None)
        session.retain_ns = retain_ns
        self.retention.schedule(session.key, session.retained_until_ns)
        self.outbox.index.session_changed(session.key)
        if session.pin is not Pin.HARD:
            self.policy.guard(session.key, session.guard)
            self.tenants.guard(session.key, session.guard)

    def set_spans(self, session: Session, spans: Sequence[Span]) -> None:
        """Replace a session's spans; blocks that lose their last user go."""
        self.tails.unpack(session)
        if self.stored_parts is not None:
            self.stored_parts.replace(session.key, session.spans, spans)
        before = session.block_keys()
        session.spans = list(spans)
        self.outbox.fetch_ended(session.key)
        after = session.block_keys()
        self.outbox.index.session_changed(session.key)
        self.users.add(session, (self.blocks[key] for key in after if key not in before))
        for block_key in reversed(before):  # tail first: what remains is a prefix at any moment
            if block_key not in after:
                block = self.blocks[block_key]
                self.users.remove(session, block)
                self.settle(block)
                if len(block.users) == 1:  # it is private now
                    self.tails.pack_later(block.newest_user())

    def cut(self, session: Session, num_spans: int, why: str) -> None:
        """Keep the session's first spans, and nothing packed; one without any is dropped."""
        if num_spans == 0:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        num_lost = session.num_spans - num_spans
        self._drop_packed(session, session.num_packed)
        self.set_spans(session, whole_prefix(session.spans, num_spans))
        self._was_cut(session, num_lost, why)

    def cut_packed(self, session: Session, num_blocks: int, why: str) -> None:
        """Drop the session's last packed blocks; a session without any span is dropped."""
        if not session.spans and num_blocks == session.num_packed:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        if self.stored_parts is not None:  # nothing of several parts is cut in the middle
            self.cut(session, session.num_spans - num_blocks, why)
            return
        self._drop_packed(session, num_blocks)
        self.outbox.index.session_changed(session.key)
        self._was_cut(session, num_blocks, why)

    def drop_session(self, session: Session, event: str, why: str) -> None:
        """Forget a session and every block only it uses."""
        num_tokens, num_blocks = session.num_tokens, session.num_spans
        self._drop_packed(session, session.num_packed)
        del self.sessions[session.key]
        for clock in self._clocks:
            clock.forget(session.key)
        self.wasteful.pop(session.key, None)
        self.set_spans(session, ())
        self.outbox.index.session_gone(session.key, is_indexed=session.is_indexed)
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
        """Record a move of a session's KV; without a session there is nothing to remember."""
        self.history.record(
            key, kind, self.now_ns, num_blocks=num_blocks, num_tokens=num_tokens, why=why
        )

    def record_block_move(self, block: Block, kind: MoveKind, why: str = "") -> None:
        """Record what became of a block, with the session that used it last."""
        self.record_move(block.last_user, kind, num_blocks=1, num_tokens=block.num_tokens, why=why)

    def _was_cut(self, session: Session, num_blocks: int, why: str) -> None:
        session.lost = why
        self.record_move(session.key, MoveKind.CUT, num_blocks=num_blocks, why=why)
        self.outbox.emit(SESSION_CUT, session.key, {"why": why, "num_tokens": session.num_tokens})

    def cut_users(self, block: Block, why: str) -> int:
        """Cut every session at a block that is lost; returns how many sessions that dropped."""
        num_before = len(self.sessions)
        for key in tuple(block.users):
            session = self.sessions[key]
            if block.num_tokens:
                self.cut(session, session.index_of(block.key), why)
            else:  # of what it is a part of nothing is of use any more, and the tokens are
                self.tails.unpack(session)
                self.set_spans(session, without_parts(session.spans, block.key))
                self.record_move(key, MoveKind.PARTS_DROPPED, num_blocks=1, why=why)
        return num_before - len(self.sessions)

    def _drop_packed(self, session: Session, num_blocks: int) -> None:
        """Drop the session's last packed blocks, without making blocks of them."""
        if self.stored_parts is not None:
            self.tails.unpack(session)  # its states and windows are found by its spans
        if not num_blocks or not session.packed:
            return
        for record in reversed(self.tails.take(session, num_blocks)):
            self.drop_entry(record.key, record.extent, record.num_tokens)
        self.tenants.charge(session.key.tenant, -num_blocks)

    # -------------------------------------------------------------------------------------- blocks

    def settle(self, block: Block) -> None:
        """Put a block in order that lost a user, a lease or an operation.

        If nobody wants it, it goes; otherwise one of its users answers for it in each tier.
        """
        if not self.blocks.holds(block):
            return
        if block.users:
            block.is_discarded = False
            self.users.settle(block)
        elif not block.wanted and block.io is BlockIo.IDLE:
            self.forget(block)

    def find_block(self, key: bytes) -> Block | None:
        """Find a block by its key, be it packed; look-ups go along the content chain."""
        block = self.blocks.get(key)
        owner = self.tails.heads.get(key) if block is None else None
        if owner is not None:
            self.tails.unpack(self.sessions[owner])
            block = self.blocks[key]
        return block

    def forget(self, block: Block) -> None:
        """Take a block out of every tier and the index; a write of it then finds nobody."""
        assert block.io in (BlockIo.IDLE, BlockIo.WRITING), "a block is forgotten at rest"
        self.unwritten.forget(block)
        if block.slot_id is not None:
            self.leave_dram(block)
        if block.extent is not None:
            self.leave_ssd(block)
        self.blocks.remove(block)
        self.discarded.removed(block)
        if block.tenant:  # else nobody has ever used it
            self.tenants.charge(block.tenant, -1)

    def lose(self, block: Block, why: str) -> None:
        """Forget a block whose bytes nowhere are what was stored; its sessions are cut there."""
        self.cut_users(block, why)
        if self.blocks.holds(block):  # a lease builds on it; its completion finds it gone
            self.forget(block)

    def leave_dram(self, block: Block) -> None:
        """Free the block's slot."""
        self.unverified.pop(block.key, None)
        self.outbox.count("prefetch_wasted", block.is_ahead)
        self.free_slot(self.blocks.leave_dram(block))

    def leave_ssd(self, block: Block) -> None:
        """Have the block's entry removed; its extent is free once that is committed."""
        self.drop_entry(block.key, self.blocks.leave_ssd(block), block.num_tokens)

    def drop_entry(self, key: bytes, extent: int | None, num_tokens: int = 0) -> None:
        """Have a block's entry removed, and then its extent freed."""
        op_id = self.under_way.next_op_id()
        if extent is None:
            self.under_way.drops[op_id] = None
        else:
            self.under_way.drops[op_id] = (extent, self.shape.num_sectors(num_tokens))
            self.scrubbed.pop((Tier.SSD, extent), None)
        self.outbox.index.add(DropBlock(op_id, key))

    # --------------------------------------------------------------------------------------- slots

    def clear_slot(self, slot_id: int) -> None:
        """Record in the journal that nothing in the slot counts."""
        self.scrubbed.pop((Tier.DRAM, slot_id), None)
        self.journal.clear(slot_id)

    def free_slot(self, slot_id: int) -> None:
        """Give a slot back."""
        self.clear_slot(slot_id)
        self.slots.free(slot_id)
        self.outbox.space_freed()
