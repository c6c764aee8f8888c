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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.eviction.policy import EvictionPolicy
from kvd.core.eviction.registry import PolicyMaker
from kvd.core.eviction.ttl import TtlClock
from kvd.core.records.actions import (
    SESSION_CUT,
    SESSION_DROPPED,
    SESSION_EXPIRED,
    SESSION_FLUSHED,
    ClearSlot,
    DropBlock,
    PutSlot,
)
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.records.records import (
    Admission,
    CommittedSlot,
    Pin,
    SlotRecord,
    Span,
    Tier,
    WritingSlot,
)
from kvd.core.state.block import Block, BlockIndex, BlockIo
from kvd.core.state.block_users import BlockUsers
from kvd.core.state.extents import ExtentTable
from kvd.core.state.folding import FoldedTails
from kvd.core.state.leases import LeaseTable, LoadLease
from kvd.core.state.measures import Measures
from kvd.core.state.outbox import Outbox
from kvd.core.state.session import Session
from kvd.core.state.session_history import MoveKind, SessionHistory
from kvd.core.state.session_placement import SessionPlacement
from kvd.core.state.slots import SlotState, SlotTable
from kvd.core.state.tenants import TenantLimits, TenantTable, no_limits
from kvd.core.state.turn_log import MAX_TURNS, TurnLog
from kvd.core.state.write_queue import WriteQueue
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

if TYPE_CHECKING:
    from kvd.core.state.compaction_run import Compaction

FOLD_BATCH = 64  # sessions per call, so that one call stays short
_DROPS = {
    SESSION_DROPPED: MoveKind.DROPPED,
    SESSION_EXPIRED: MoveKind.EXPIRED,
    SESSION_FLUSHED: MoveKind.FLUSHED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds and policies of one cache engine."""

    num_slots: int  # 0: no arena (yet)
    num_extents: int  # 0: no SSD tier
    default_ttl_ns: int | None = None  # None: never expire
    max_sessions: int = 1_000_000
    max_leases: int = 65_536
    max_turns: int = MAX_TURNS  # of the log of recent ones
    admission: Admission = Admission.WRITE_THROUGH
    write_back_delay_ns: int = 30 * NS_PER_S  # how long a session is left alone before its write
    max_write_bytes: int = 256 << 20  # of writes issued and not done
    verify_on_load: bool = False
    layered_read_bytes: int = 32 << 20  # a load that reads more than this goes layer by layer
    tenant_limits: Callable[[str], TenantLimits] = no_limits  # asked once per tenant and change
    folds_sessions: bool = True  # False: idle ones stay as they are, at a price in memory
    watermark: float = 0.0  # share of the slots that is kept free, for stores and loads only
    prefetch_bytes: int = 0  # of reads ahead of loads, issued and not done; 0: none
    reads_returning: bool = True  # also ahead of turns that are only likely
    max_waste: float = 1.0  # share of unused rows from which on blocks are compacted; 1: never
    compact_min_bytes: int = 0  # of such blocks, below which a session is left as it is
    compact_rest_ns: int = 2 * NS_PER_S  # how long a session is left alone before


@dataclass(slots=True, eq=False)
class Arrival:
    """An SSD read or a verification under way, and the leases that wait for it.

    Attributes:
        was_queued: the block was to be written, and is again once it is verified.
        is_ahead: a read that no load has come to wait for.
        early: leases that were given the block before its verification began: they do not wait, and
            end if it turns out corrupt.
    """

    op_id: int
    block: Block
    was_queued: bool = False
    is_ahead: bool = False
    waiting: dict[int, LoadLease] = field(default_factory=dict)
    early: dict[int, LoadLease] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WriteOp:
    """An SSD write under way. The extent is the write's until its row is put."""

    block: Block
    extent: int
    num_sectors: int


class CacheState:
    """See the module docstring."""

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
        self.placement = SessionPlacement(make_policy, self._capacity_bytes)
        self.users = BlockUsers(self.blocks, self.sessions, self.policy)
        self._clocks: list[TtlClock] = []  # see make_clock
        self.ttl = self.make_clock()
        self.turns = TurnLog(limits.max_turns)
        self.outbox = Outbox()
        self.measures = Measures()
        self.reads: dict[int, Arrival] = {}
        self.verifies: dict[int, Arrival] = {}
        self.arrival_of: dict[bytes, Arrival] = {}  # both, by block key
        self.hashes: dict[int, Block] = {}
        self.writes: dict[int, WriteOp] = {}
        self.compaction: Compaction | None = None  # under way
        self.drops: dict[int, tuple[int, int] | None] = {}  # run to free when the row is gone
        self.wipes: dict[int, list[int]] = {}  # slots that are zeroed
        # Adopted blocks whose verification is not begun, in the order in which it will be.
        self.unverified: OrderedDict[bytes, Block] = OrderedDict()
        self.unwritten = WriteQueue(self.shape, self.extents)
        # Dirty blocks that found no extent, oldest first.
        self.refused: OrderedDict[bytes, Block] = OrderedDict()
        self.mean_store_blocks = 0.0  # that a store asks slots for
        self.kept_unfolded: SessionKey | None = None  # its blocks are being read ahead
        self.journal: dict[int, SlotState] = {}  # what the journal says of each slot: a mirror
        self.scrubbed: dict[tuple[Tier, int], int] = {}  # slot or extent -> operation of a scrub
        self.wasteful: OrderedDict[SessionKey, None] = OrderedDict()  # that wait to be compacted
        self.tails = FoldedTails(self.blocks)
        self.tenants = TenantTable(limits.tenant_limits, layout.block_bytes)
        self.history = SessionHistory()
        self.num_pins = dict.fromkeys((Pin.SOFT, Pin.HARD), 0)  # sessions
        self.ssd_degraded = ""  # why writes are held back; "": they are not
        self.now_ns = 0
        self._next_op_id = 1

    @property
    def policy(self) -> EvictionPolicy:
        """What ranks sessions for eviction."""
        return self.placement.policy

    def _capacity_bytes(self) -> int:
        return (len(self.slots) + len(self.extents)) * self.layout.block_bytes

    @property
    def num_kept_free(self) -> int:
        """Slots of the watermark."""
        return int(self.limits.watermark * len(self.slots))

    def advance(self, now_ns: int) -> None:
        """Take the time of a call. It never goes back (D17)."""
        self.now_ns = max(self.now_ns, now_ns)

    def next_op_id(self) -> int:
        """Number an operation of the performer."""
        self._next_op_id += 1
        return self._next_op_id - 1

    def is_cleaning(self) -> bool:
        """Whether dirty blocks become clean, or may be written, in time."""
        under_way = self.hashes or self.verifies or self.writes or self.compaction or self.wipes
        return bool(under_way or (len(self.unwritten) and self.drops))

    def num_sectors(self, block: Block) -> int:
        """Sectors of the block's extent."""
        return self.shape.num_sectors(block.num_tokens)

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
        """Note a use of the session: O(its blocks)."""
        session.last_access_ns = self.now_ns
        session.num_read_ahead = 0
        if session.ended:
            session.ended = False
            self.outbox.index.session_changed(session.key)
        if session.pin is not Pin.HARD:
            self.users.touched(session, self.now_ns)
            self.tenants.touched(session.key)
        for span in session.spans:
            self.blocks[span.block_key].last_user = session.key
        self.schedule_expiry(session)

    def inherited_ttl_ns(self, tenant: str) -> int | None:
        """TTL of a tenant's sessions that have none of their own: the tenant's, or the default."""
        ttl_ns = self.tenants.limits(tenant).ttl_ns
        return self.limits.default_ttl_ns if ttl_ns is None else ttl_ns

    def expires_at_ns(self, session: Session) -> int | None:
        """When the session's TTL passes; None for never."""
        return session.expires_at_ns(self.inherited_ttl_ns(session.key.tenant))

    def schedule_expiry(self, session: Session) -> None:
        """Have the TTL clock look at the session in time."""
        self.ttl.schedule(session.key, self.expires_at_ns(session))

    def set_spans(self, session: Session, spans: Sequence[Span]) -> None:
        """Replace a session's spans; blocks that lose their last user go."""
        self.unfold(session)
        before = session.block_keys()
        session.spans = list(spans)
        after = session.block_keys()
        self.outbox.index.session_changed(session.key)
        self.users.add(session, (self.blocks[key] for key in after if key not in before))
        for block_key in reversed(before):  # tail first: what remains is a prefix at any moment
            if block_key not in after:
                block = self.blocks[block_key]
                self.users.remove(session, block)
                self.settle(block)
                if len(block.users) == 1:  # it is private now
                    self.fold_later(block.newest_user())

    def cut(self, session: Session, num_spans: int, why: str) -> None:
        """Keep the session's first spans, and nothing folded; one without any is dropped."""
        if num_spans == 0:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        num_lost = session.num_spans - num_spans
        self._drop_folded(session, session.num_folded)
        self.set_spans(session, session.spans[:num_spans])
        self._was_cut(session, num_lost, why)

    def cut_folded(self, session: Session, num_blocks: int, why: str) -> None:
        """Give up the session's last folded blocks; a session without any span is dropped."""
        if not session.spans and num_blocks == session.num_folded:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        self._drop_folded(session, num_blocks)
        self.outbox.index.session_changed(session.key)
        self._was_cut(session, num_blocks, why)

    def drop_session(self, session: Session, event: str, why: str) -> None:
        """Forget a session and every block only it uses."""
        num_tokens, num_blocks = session.num_tokens, session.num_spans
        self._drop_folded(session, session.num_folded)
        del self.sessions[session.key]
        for clock in self._clocks:
            clock.forget(session.key)
        self.wasteful.pop(session.key, None)
        self.set_spans(session, ())
        self.outbox.index.session_gone(session.key, is_indexed=session.is_indexed)
        self.policy.removed(session.key)
        self.tenants.removed(session.key)
        self.tenants.count_session(session.key.tenant, -1)
        self.count_pin(session, -1)
        self.outbox.emit(event, session.key, {"why": why, "num_tokens": num_tokens})
        self.note(session.key, _DROPS[event], num_blocks=num_blocks, num_tokens=num_tokens, why=why)

    def note(
        self,
        key: SessionKey | None,
        kind: MoveKind,
        *,
        num_blocks: int = 0,
        num_tokens: int = 0,
        why: str = "",
    ) -> None:
        """Remember a move of a session's KV; without a session there is nothing to remember."""
        self.history.note(
            key, kind, self.now_ns, num_blocks=num_blocks, num_tokens=num_tokens, why=why
        )

    def note_block(self, block: Block, kind: MoveKind, why: str = "") -> None:
        """Remember what became of a block, with the session that used it last."""
        self.note(block.last_user, kind, num_blocks=1, num_tokens=block.num_tokens, why=why)

    def _was_cut(self, session: Session, num_blocks: int, why: str) -> None:
        session.lost = why
        self.note(session.key, MoveKind.CUT, num_blocks=num_blocks, why=why)
        self.outbox.emit(SESSION_CUT, session.key, {"why": why, "num_tokens": session.num_tokens})

    def cut_users(self, block: Block, why: str) -> int:
        """Cut every session at a block that is lost; returns how many sessions that dropped."""
        num_before = len(self.sessions)
        for key in tuple(block.users):
            session = self.sessions[key]
            self.cut(session, session.index_of(block.key), why)
        return num_before - len(self.sessions)

    # ------------------------------------------------------------------------------------- folding

    def unfold(self, session: Session) -> None:
        """Have all blocks of a session in the index; it is folded again when it may be."""
        if session.folded:
            self.users.add(session, self.tails.unfold(session))
            self.fold_later(session.key)

    def fold_later(self, key: SessionKey) -> None:
        """Look at a session after this call: perhaps it can be folded."""
        if self.limits.folds_sessions:
            self.tails.fold_later(key)

    def fold_idle(self) -> None:
        """Fold sessions that are not in use; a bounded number per call. No call is under way."""
        waiting = self.tails.waiting
        for _ in range(min(len(waiting), FOLD_BATCH)):
            key, _ = waiting.popitem(last=False)
            session = self.sessions.get(key)
            if session is None:
                continue
            if key == self.kept_unfolded or self.tails.fold(session):
                waiting[key] = None

    def _drop_folded(self, session: Session, num_blocks: int) -> None:
        """Give up the session's last folded blocks, without making blocks of them."""
        if not num_blocks:
            return
        for record in reversed(self.tails.take(session, num_blocks)):
            self.drop_row(record.key, record.extent, record.num_tokens)
        self.tenants.charge(session.key.tenant, -num_blocks)

    # -------------------------------------------------------------------------------------- blocks

    def settle(self, block: Block) -> None:
        """Put a block in order that lost a user, a lease or an operation.

        If nobody wants it, it goes; otherwise one of its users answers for it in each tier.
        """
        if not self.blocks.holds(block):
            return
        if block.users:
            self.users.settle(block)
        elif not block.wanted and block.io is BlockIo.IDLE:
            self.forget(block)

    def find_block(self, key: bytes) -> Block | None:
        """Find a block by its key, be it folded; look-ups go along the content chain."""
        block = self.blocks.get(key)
        owner = self.tails.heads.get(key) if block is None else None
        if owner is not None:
            self.unfold(self.sessions[owner])
            block = self.blocks[key]
        return block

    def forget(self, block: Block) -> None:
        """Take a block out of every tier and the index; a write of it then finds nobody."""
        assert block.io in (BlockIo.IDLE, BlockIo.WRITING), "a block is forgotten at rest"
        self.unwritten.discard(block)
        self.refused.pop(block.key, None)
        if block.slot_id is not None:
            self.leave_dram(block)
        if block.extent is not None:
            self.leave_ssd(block)
        self.blocks.remove(block)
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
        """Have the block's row removed; its extent is free once that is committed."""
        self.drop_row(block.key, self.blocks.leave_ssd(block), block.num_tokens)

    def drop_row(self, key: bytes, extent: int | None, num_tokens: int = 0) -> None:
        """Have a block's row removed, and then its extent freed."""
        op_id = self.next_op_id()
        self.drops[op_id] = None
        if extent is not None:
            self.drops[op_id] = (extent, self.shape.num_sectors(num_tokens))
            self.scrubbed.pop((Tier.SSD, extent), None)
        self.outbox.index.add(DropBlock(op_id, key))

    # --------------------------------------------------------------------------------------- slots

    def put_slot(self, slot_id: int, record: SlotRecord) -> None:
        """Note in the journal what a slot holds."""
        is_writing = isinstance(record, WritingSlot)
        self.journal[slot_id] = SlotState.WRITING if is_writing else SlotState.COMMITTED
        self.outbox.add(PutSlot(slot_id, record))

    def put_block_slot(self, block: Block) -> None:
        """Note in the journal that a slot holds a hashed block: a next kvd may adopt it."""
        assert block.slot_id is not None, "only a block in DRAM is in the journal"
        assert block.checksums, "only a hashed block is in the journal"
        record = CommittedSlot(
            block.generation, block.key, block.num_tokens, block.token_ids, block.checksums
        )
        self.put_slot(block.slot_id, record)

    def clear_slot(self, slot_id: int) -> None:
        """Note in the journal that nothing in the slot counts."""
        self.scrubbed.pop((Tier.DRAM, slot_id), None)
        if self.journal.pop(slot_id, None) is not None:
            self.outbox.add(ClearSlot(slot_id))

    def free_slot(self, slot_id: int) -> None:
        """Give a slot back."""
        self.clear_slot(slot_id)
        self.slots.free(slot_id)
        self.outbox.space_freed()
