"""The world around a cache engine, in memory: slots, extents and index rows that hold symbolic KV.

A row of KV is a digest of everything it was computed from: the rows before it and its token. Two
rows are equal exactly when the computations are, which is what block keys promise and what loads
are checked against.
"""

import struct
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import LruPolicy
from kvd.core.eviction.policy import PolicyMaker
from kvd.core.records.actions import (
    Action,
    CommitIndex,
    CompactTokens,
    DropBlock,
    DropSession,
    HashSlots,
    IoOutcome,
    PutBlock,
    PutSession,
    PutUse,
    ReadBlock,
    RelocateBlock,
    ReplaceBlock,
    TrackLoad,
    UntrackLoad,
    VerifyExtent,
    VerifySlot,
    WipeSlots,
    WriteBlock,
    WriteJournal,
)
from kvd.core.records.entries import (
    AdoptedSlot,
    BlockRecord,
    CommittedSlot,
    IndexEntries,
    OrphanSlot,
    SessionRecord,
    SlotRecord,
    StoredBlock,
    columns_of,
)
from kvd.core.records.extent_shape import ExtentShape
from kvd.core.state.index_line import NO_BOUND
from kvd.core.state.limits import Limits
from shared.types.kv_layout import Component, KVLayout, Layer
from shared.types.session_key import SessionKey

BLOCK_TOKENS = 4
MODEL = "0f"
# A full block has 5 sectors on SSD, a partial one 2 (packed by twos), 3 or 4.
LAYOUT = KVLayout(MODEL, (Layer((Component("k", (4, 256), "float32"),)),), BLOCK_TOKENS)
SHAPE = ExtentShape(LAYOUT)
# how far ids of engines that an earlier kvd knew are shifted, as the shell does
ADOPTED_ENGINES = 100

MOST_ROUNDS = 1000  # of operations that follow from each other: more never happen

Row = int  # symbolic KV of one token


def salt_of(tenant: str) -> bytes:
    return tenant.encode().ljust(32, b"\0")


def to_bytes(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def compute(rows: list[Row], tokens: list[int]) -> list[Row]:
    """Compute the rows of `tokens` after `rows`; return all of them."""
    rows = list(rows)
    for token in tokens:
        rows.append(hash((rows[-1] if rows else 0, len(rows), token)))
    return rows


def checksums_of(rows: list[Row]) -> bytes:
    return struct.pack("<Q", hash(tuple(rows)) % 2**64)


def run_of(block: BlockRecord | WriteBlock | RelocateBlock) -> range:
    """Return the number of sectors of a block."""
    return range(block.extent, block.extent + SHAPE.num_sectors(block.num_tokens))


@dataclass
class Index:
    """The index as of its last commit, and the rows that are not committed yet."""

    blocks: dict[bytes, BlockRecord] = field(default_factory=dict)
    sessions: dict[SessionKey, SessionRecord] = field(default_factory=dict)
    uncommitted: list[Action] = field(default_factory=list)

    def commit(self, num_actions: int) -> list[DropBlock | ReplaceBlock | CommitIndex]:
        """Commit the oldest actions; return those that need an answer."""
        committed, self.uncommitted = self.uncommitted[:num_actions], self.uncommitted[num_actions:]
        answered: list[DropBlock | ReplaceBlock | CommitIndex] = []
        for action in committed:
            if isinstance(action, PutBlock):
                self.blocks[action.block.key] = action.block
            elif isinstance(action, ReplaceBlock):
                assert action.block.key in self.blocks, "an entry that is replaced exists"
                self.blocks[action.block.key] = action.block
                answered.append(action)
            elif isinstance(action, PutSession):
                self.sessions[action.session.key] = action.session
            elif isinstance(action, PutUse):
                session = self.sessions[action.key]
                self.sessions[action.key] = replace(session, last_access_ns=action.last_access_ns)
            elif isinstance(action, DropSession):
                self.sessions.pop(action.key, None)
            elif isinstance(action, DropBlock):
                self.blocks.pop(action.key, None)
                answered.append(action)
            elif isinstance(action, CommitIndex):
                answered.append(action)
        return answered

    def rows(self) -> IndexEntries:
        """Return what a new kvd reads."""
        blocks = list(self.blocks.values())
        return IndexEntries(
            [columns_of(self.sessions.values())],
            b"".join(block.key for block in blocks),
            [block.extent for block in blocks],
            [block.num_tokens for block in blocks],
        )


@dataclass(frozen=True)
class Extent:
    """The contents of an extent on SSD: header and rows."""

    key: bytes
    stored: StoredBlock
    rows: list[Row]
    tenant: str  # tenant whose key seals it

    def holds(self, key: bytes, num_tokens: int) -> bool:
        """Return whether this is the block, and its bytes are good."""
        num_rows = num_tokens or 1  # a part of a state or a window is a single row
        is_same = self.key == key and len(self.rows) == num_rows
        return is_same and self.stored.checksums.startswith(checksums_of(self.rows))


IndexAction = PutBlock | ReplaceBlock | PutSession | PutUse | DropSession | DropBlock | CommitIndex
Io = (
    ReadBlock
    | VerifySlot
    | VerifyExtent
    | HashSlots
    | WriteBlock
    | RelocateBlock
    | CompactTokens
    | WipeSlots
)


class CacheWorld:
    """A cache engine with its performer; tests decide when and how its operations end.

    Attributes:
        engine: its time is set before every call, as kvd's event loop does.
    """

    def __init__(
        self, limits: Limits, make_policy: PolicyMaker = LruPolicy, layout: KVLayout = LAYOUT
    ) -> None:
        self.limits = limits
        self.layout = layout
        self.make_policy = make_policy
        self.index = Index()
        self.extents: dict[int, Extent] = {}
        self.slots: list[list[Row]] = []
        self.journal: dict[int, SlotRecord] = {}
        self.now_ns = 1_000
        self.row_bytes = NO_BOUND  # actions that the index takes at a time
        self.epoch = 0
        self.start()

    def start(self, *, keep_dram: bool = False, alive: Collection[int] = ()) -> None:
        """Start a daemon on the committed index, and on the arena if it is kept.

        Args:
            keep_dram: the arena has survived the daemon; otherwise it starts empty.
            alive: engines whose processes live; their ids become ADOPTED_ENGINES higher.
        """
        self.index.uncommitted = []
        if not keep_dram:
            self.slots = [[] for _ in range(self.limits.num_slots)]
            self.journal = {}
        adopted, orphans = self._read_journal(alive)
        self.io: dict[int, Io] = {}
        self.checked: dict[int, SlotRecord | None] = {}  # the blocks that are being verified
        self.tracked: dict[int, tuple[int, ...]] = {}
        self.events: list[Action] = []
        self.engine = CacheEngine(self.layout, self.limits, salt_of, self.make_policy)
        self.epoch += 1
        rows, first_lease_id = self.index.rows(), self.epoch << 40
        self.engine.restore(rows, adopted, orphans, first_lease_id)
        self.pump()

    @property
    def engine(self) -> CacheEngine:
        self._engine.advance(self.now_ns)
        return self._engine

    @engine.setter
    def engine(self, engine: CacheEngine) -> None:
        self._engine = engine

    def _read_journal(self, alive: Collection[int]) -> tuple[list[AdoptedSlot], list[OrphanSlot]]:
        """Read the contents of slots.

        The real journal names processes where this one has their ids.
        """
        adopted, orphans = [], []
        for slot_id, record in sorted(self.journal.items()):
            if isinstance(record, CommittedSlot):
                adopted.append(AdoptedSlot(slot_id, record))
            elif record.engine_id in alive:
                self.journal[slot_id] = writing = record._replace(
                    engine_id=record.engine_id + ADOPTED_ENGINES
                )
                orphans.append(OrphanSlot(slot_id, writing))
            else:
                del self.journal[slot_id]
        return adopted, orphans

    def pump(self) -> None:
        """Take the engine's actions."""
        self._engine.check()
        for action in self._engine.drain(self.row_bytes):
            if isinstance(action, Io):
                self._begin(action)
            elif isinstance(action, IndexAction):
                self.index.uncommitted.append(action)
            elif isinstance(action, WriteJournal):
                self.journal |= action.records
                self.journal = {slot: record for slot, record in self.journal.items() if record}
            elif isinstance(action, TrackLoad):
                assert set(action.op_ids) <= set(self.io), "a tracked operation is under way"
                self.tracked[action.lease_id] = action.op_ids
            elif isinstance(action, UntrackLoad):
                del self.tracked[action.lease_id]
            else:
                self.events.append(action)

    def _begin(self, action: Io) -> None:
        self.io[action.op_id] = action
        if isinstance(action, VerifySlot):
            self.checked[action.op_id] = self.journal.get(action.slot_id)
        if isinstance(action, WriteBlock | RelocateBlock):
            in_use = {sector for block in self.index.blocks.values() for sector in run_of(block)}
            assert in_use.isdisjoint(run_of(action)), "an extent is reused before its row is gone"
        if isinstance(action, WriteBlock):
            assert action.checksums, "what is written was hashed"
            assert action.key not in self._written(), "a clean block is written again"

    def _written(self) -> set[bytes]:
        """Return the blocks that are on SSD according to the committed index."""
        keys = set(self.index.blocks)
        waiting = self._engine._state.outbox.index._line.values()
        for action in (*self.index.uncommitted, *waiting):
            if isinstance(action, PutBlock):
                keys.add(action.block.key)
            elif isinstance(action, DropBlock):
                keys.discard(action.key)
        return keys

    def commit(self, num_actions: int) -> None:
        """Commit index rows and report the dropped blocks among them."""
        for action in self.index.commit(num_actions):
            if isinstance(action, DropBlock):
                self.engine.writes.drop_done(action.op_id)
            elif isinstance(action, ReplaceBlock):
                self.engine.relocations.replace_done(action.op_id)
            else:
                self.engine.compactions.commit_done(action.op_id)
        self.pump()

    def set_capacity(self, num_extents: int) -> None:
        """Set the size of the SSD tier, and cut the files as far as that is allowed."""
        end = self.engine.set_ssd_capacity(num_extents)
        self.pump()
        if end is None:
            return
        first_lost = max(end, num_extents) * SHAPE.sectors_per_extent
        named = [block.extent for block in self.index.blocks.values()]
        assert all(extent < first_lost for extent in named), "no row names what is cut off"
        self.extents = {place: x for place, x in self.extents.items() if place < first_lost}

    def tenants_on_ssd(self) -> set[str]:
        """Return the tenants whose blocks are in the index."""
        return {self.extents[block.extent].tenant for block in self.index.blocks.values()}

    def damage_slot(self, slot_id: int) -> None:
        """Flip a bit in DRAM."""
        self.slots[slot_id] = [-1, *self.slots[slot_id][1:]]

    def damage_extent(self, number: int) -> None:
        """Flip a bit on SSD."""
        extent = self.extents[number]
        self.extents[number] = replace(extent, rows=[-1, *extent.rows[1:]])

    def finish_io(self, op_id: int, outcome: IoOutcome = IoOutcome.OK) -> None:
        """End one operation: with success if its bytes are good, else with CORRUPT.

        CORRUPT damages them just before; any other outcome is reported as given.
        """
        action = self.io.pop(op_id)
        if outcome is IoOutcome.CORRUPT:
            self._damage(action)
            outcome = IoOutcome.OK
        if isinstance(action, WriteBlock):
            self._finish_write(action, outcome)
        elif isinstance(action, RelocateBlock):
            self._finish_relocation(action, outcome)
        elif isinstance(action, HashSlots):
            is_ok = outcome is IoOutcome.OK
            rows = [self.slots[slot_id] for slot_id, _ in action.slots]
            checksums = [self.checksums_of(slot) if is_ok else b"" for slot in rows]
            self.engine.hashes.hash_done(action.op_id, checksums)
        elif isinstance(action, ReadBlock):
            self._finish_read(action, outcome)
        elif isinstance(action, CompactTokens):
            self._finish_compaction(action, outcome)
        elif isinstance(action, WipeSlots):
            for slot_id in action.slot_ids:
                assert slot_id not in self.journal, "a slot that is wiped is nobody's"
                self.slots[slot_id] = []
            self.engine.erasing.wipe_done(action.op_id, outcome)
        else:
            if outcome is IoOutcome.OK and not self._is_good(action):
                outcome = IoOutcome.CORRUPT
            self.engine.arrivals.verify_done(action.op_id, outcome)
        self.pump()

    def checksums_of(self, rows: list[Row]) -> bytes:
        """Hash a slot; one hash of all of it stands for that of each layer."""
        return checksums_of(rows) * len(self.layout.layers)

    def _finish_compaction(self, action: CompactTokens, outcome: IoOutcome) -> None:
        sources = ((self.checksums_of(self.slots[s.slot_id]), s.checksums) for s in action.sources)
        if outcome is IoOutcome.OK and any(found != stored for found, stored in sources):
            outcome = IoOutcome.CORRUPT
        made = []
        for block in action.blocks if outcome is IoOutcome.OK else ():
            slots = ((self.slots[run.slot_id], run) for run in block.runs)
            rows = [row for slot, run in slots for row in slot[run.start :][: run.num_tokens]]
            assert len(rows) == block.num_tokens, "a block is filled"
            self.slots[block.slot_id] = rows
            made.append(self.checksums_of(rows))
        self.engine.compactions.copy_done(action.op_id, outcome, made)

    def _damage(self, action: Io) -> None:
        """Flip a bit of what is being verified; of a slot only if it still holds the block."""
        if isinstance(action, VerifySlot):
            record = self.checked.get(action.op_id)
            if record is not None and self.journal.get(action.slot_id) is record:
                self.damage_slot(action.slot_id)
        elif isinstance(action, ReadBlock | VerifyExtent) and action.extent in self.extents:
            self.damage_extent(action.extent)

    def _is_good(self, action: VerifySlot | VerifyExtent) -> bool:
        if isinstance(action, VerifySlot):
            return self.checksums_of(self.slots[action.slot_id]) == action.checksums
        extent = self.extents.get(action.extent)
        return extent is not None and extent.holds(action.key, action.num_tokens)

    def _finish_write(self, action: WriteBlock, outcome: IoOutcome) -> None:
        for sector in run_of(action):
            self.extents.pop(sector, None)
        if outcome is IoOutcome.OK:
            stored = StoredBlock(action.token_ids, action.checksums)
            rows = list(self.slots[action.slot_id])
            self.extents[action.extent] = Extent(action.key, stored, rows, action.tenant)
        self.engine.writes.write_done(action.op_id, outcome)

    def _finish_relocation(self, action: RelocateBlock, outcome: IoOutcome) -> None:
        for sector in run_of(action):
            self.extents.pop(sector, None)
        source = self.extents.get(action.source)
        if source is None:
            outcome = IoOutcome.CORRUPT
        elif outcome is IoOutcome.OK:
            self.extents[action.extent] = source
        self.engine.relocations.relocate_done(action.op_id, outcome)

    def _finish_read(self, action: ReadBlock, outcome: IoOutcome) -> None:
        extent = self.extents[action.extent]
        is_good = extent.holds(action.key, action.num_tokens)
        if outcome is IoOutcome.OK and not is_good:
            outcome = IoOutcome.CORRUPT
        is_ok = outcome is IoOutcome.OK
        self.slots[action.slot_id] = list(extent.rows) if is_ok else [-1]
        stored = extent.stored if is_ok else None
        self.engine.arrivals.read_done(action.op_id, outcome, stored)

    def io_of(self, kind: type) -> list[int]:
        """Return the active operations of one kind, oldest first."""
        return sorted(op_id for op_id, action in self.io.items() if isinstance(action, kind))

    def finish_all(self, kind: type, outcome: IoOutcome = IoOutcome.OK) -> None:
        """End all operations of one kind."""
        for op_id in self.io_of(kind):
            self.finish_io(op_id, outcome)

    def quiesce(self, *, newest_first: bool = False) -> None:
        """End all active operations with success, and commit the whole index, uses included."""
        self.row_bytes = NO_BOUND
        self.pump()
        self.index.uncommitted += self.engine.index_line.take()
        num_rounds = 0
        while self.io or self.index.uncommitted:
            num_rounds += 1
            assert num_rounds < MOST_ROUNDS, "operations come to an end"
            for op_id in sorted(self.io, reverse=newest_first):
                self.finish_io(op_id)
            self.commit(len(self.index.uncommitted))
