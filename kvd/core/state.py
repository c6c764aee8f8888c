"""CacheState: the tables of one cache engine, and the few transitions all its parts share.

Pure. Parts (loading, storing, writing, placement) hold the state and call these; nobody else
changes a block's places or a session's spans.

Invariants (checking.py states them as code):
1. a session names only blocks of the index, and each such block names the session among its users;
2. a block nobody wants and nothing moves is gone;
3. a block with bytes in a tier has a user that is pinned or ranks in that tier's order, or no user
   at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd.core.actions import SESSION_CUT, SESSION_DROPPED, DropBlock
from kvd.core.block import Block, BlockIndex, BlockIo
from kvd.core.eviction import EvictionPolicy
from kvd.core.extents import ExtentTable
from kvd.core.leases import LeaseTable, LoadLease
from kvd.core.outbox import Outbox
from kvd.core.queue_window import QueueWindow
from kvd.core.records import Span, Tier
from kvd.core.session import Session
from kvd.core.slots import SlotTable
from kvd.core.ttl import TtlClock
from shared.kv_layout import KVLayout
from shared.session_key import SessionKey


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one cache engine."""

    num_slots: int
    num_extents: int  # 0: no SSD tier
    default_ttl_ns: int | None = None  # None: never expire
    max_sessions: int = 1_000_000
    max_leases: int = 65_536


@dataclass(slots=True, eq=False)
class ReadOp:
    """An SSD read under way, and the leases that wait for it."""

    block: Block
    waiting: dict[int, LoadLease] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class WriteOp:
    """An SSD write under way. The extent is the write's until its row is put."""

    block: Block
    extent: int


class CacheState:
    """See the module docstring."""

    def __init__(
        self,
        layout: KVLayout,
        limits: Limits,
        salt_of: Callable[[str], bytes],
        policy: EvictionPolicy,
    ) -> None:
        self.layout = layout
        self.limits = limits
        self.salt_of = salt_of
        self.policy = policy
        self.blocks = BlockIndex()
        self.sessions: dict[SessionKey, Session] = {}
        self.slots = SlotTable(limits.num_slots)
        self.extents = ExtentTable(limits.num_extents)
        self.leases = LeaseTable(limits.max_leases)
        self.queue = QueueWindow()
        self.ttl = TtlClock()
        self.outbox = Outbox()
        self.reads: dict[int, ReadOp] = {}
        self.read_of: dict[bytes, ReadOp] = {}  # by block key
        self.writes: dict[int, WriteOp] = {}
        self.drops: dict[int, int | None] = {}  # extent to free when the row is gone
        self.unwritten: dict[
            bytes, Block
        ] = {}  # dirty blocks that are to be written, oldest request first
        self.ssd_degraded = ""  # why writes are held back; "": they are not
        self.now_ns = 0
        self._next_op_id = 1

    def advance(self, now_ns: int) -> None:
        """Take the time of a call. It never goes back (D17)."""
        self.now_ns = max(self.now_ns, now_ns)

    def next_op_id(self) -> int:
        """Number an operation of the performer."""
        self._next_op_id += 1
        return self._next_op_id - 1

    def is_writing(self) -> bool:
        """Whether dirty blocks are about to become clean."""
        return bool(self.writes or (self.unwritten and self.drops))

    # ------------------------------------------------------------------------------------ sessions

    def touch(self, session: Session) -> None:
        """Note a use of the session: O(its blocks)."""
        session.last_access_ns = self.now_ns
        if session.ended:
            session.ended = False
            self.outbox.session_changed(session.key)
        if not session.pinned:
            self.policy.touched(session.key, self.now_ns)
        for span in session.spans:
            self.blocks[span.block_key].last_user = session.key
        self.schedule_expiry(session)

    def schedule_expiry(self, session: Session) -> None:
        """Have the TTL clock look at the session in time."""
        deadline_ns = session.expires_at_ns(self.limits.default_ttl_ns)
        self.ttl.schedule(session.key, deadline_ns)

    def set_spans(self, session: Session, spans: Sequence[Span]) -> None:
        """Replace a session's spans; blocks that lose their last user go."""
        before = session.block_keys()
        session.spans = list(spans)
        after = session.block_keys()
        self.outbox.session_changed(session.key)
        for block_key in after:
            if block_key not in before:
                self.blocks[block_key].users[session.key] = None
                self.blocks[block_key].last_user = session.key
        for block_key in reversed(before):  # tail first: what remains is a prefix at any moment
            if block_key not in after:
                block = self.blocks[block_key]
                del block.users[session.key]
                self.settle(block)

    def cut(self, session: Session, num_spans: int, why: str) -> None:
        """Keep the session's first spans; a session without any is dropped."""
        if num_spans == 0:
            self.drop_session(session, SESSION_DROPPED, why)
            return
        session.lost = why
        self.set_spans(session, session.spans[:num_spans])
        self.outbox.emit(SESSION_CUT, session.key, {"why": why, "num_tokens": session.num_tokens})

    def drop_session(self, session: Session, event: str, why: str) -> None:
        """Forget a session and every block only it uses."""
        num_tokens = session.num_tokens
        del self.sessions[session.key]
        self.policy.removed(session.key)
        self.set_spans(session, ())
        self.outbox.emit(event, session.key, {"why": why, "num_tokens": num_tokens})

    def cut_users(self, block: Block, why: str) -> int:
        """Cut every session at a block that is lost; returns how many sessions that dropped."""
        num_before = len(self.sessions)
        for key in tuple(block.users):
            session = self.sessions[key]
            self.cut(session, session.index_of(block.key), why)
        return num_before - len(self.sessions)

    # -------------------------------------------------------------------------------------- blocks

    def settle(self, block: Block) -> None:
        """Put a block in order that lost a user, a lease or an operation.

        If nobody wants it, it goes; otherwise one of its users answers for it in each tier.
        """
        if not self.blocks.holds(block):
            return
        if block.users:
            for tier in Tier:
                if block.resides(tier):
                    self._find_ranking_user(block, tier)
        elif not block.wanted and block.io is BlockIo.IDLE:
            self.forget(block)

    def forget(self, block: Block) -> None:
        """Take a block out of every tier and the index."""
        self.unwritten.pop(block.key, None)
        if block.slot_id is not None:
            self.leave_dram(block)
        if block.extent is not None:
            self.leave_ssd(block)
        self.blocks.remove(block)

    def leave_dram(self, block: Block) -> None:
        """Free the block's slot."""
        self.slots.free(self.blocks.leave_dram(block))
        self.outbox.space_freed()

    def leave_ssd(self, block: Block) -> None:
        """Have the block's row removed; its extent is free once that is committed."""
        self.drop_row(block.key, self.blocks.leave_ssd(block))

    def drop_row(self, key: bytes, extent: int | None) -> None:
        """Have a block's row removed, and then its extent freed."""
        op_id = self.next_op_id()
        self.drops[op_id] = extent
        self.outbox.add(DropBlock(op_id, key))

    def warm_user(self, block: Block, is_warm: Callable[[SessionKey], bool]) -> bool:
        """Whether a user of the block is warm; remembers which, so that the next look is O(1)."""
        if block.last_user in block.users and is_warm(block.last_user):
            return True
        for key in block.users:
            if is_warm(key):
                block.last_user = key
                return True
        return False

    def _find_ranking_user(self, block: Block, tier: Tier) -> None:
        def is_ranked(key: SessionKey) -> bool:
            return self.sessions[key].pinned or self.policy.ranks(key, tier)

        if not self.warm_user(block, is_ranked):
            block.last_user = next(reversed(block.users))
            self.policy.entered(block.last_user, tier)
