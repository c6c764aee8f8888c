"""The performer: carries out the cache engine's actions, and reports their completions.

    Read…, VerifyExtent        the I/O pool, shared by all layouts: see block_io.py
    WriteBlock, RelocateBlock  the I/O pool, then this layout's syncer: see block_io.py
    VerifySlot, HashSlots,
    CompactTokens, WipeSlots   the I/O pool: see slot_work.py
    WriteJournal               the journal, at once
    TrackLoad, UntrackLoad     the progress words, at once: see load_tracking.py
    Put…, Replace…, Drop…,
    CommitIndex                the manifest's writer thread, in order, as it has room for them

Every action with an op_id is answered exactly once, on the event loop, also if its thread fails.
The engine bounds the operations under way: a read or write holds a slot, a drop holds an extent,
and copies of extents are few.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvd.core.records.actions import (
    CommitIndex,
    CompactTokens,
    DropBlock,
    DropSession,
    HashSlots,
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
from kvd.core.state.index_line import IndexAction
from kvd.host.process_identity import ProcessIdentity
from kvd.runtime.block_io import BlockReader, BlockWriter
from kvd.runtime.completions import Completion, Completions, EndedOperations, IoHistograms
from kvd.runtime.load_tracking import LoadTracker
from kvd.runtime.slot_work import SlotAction, SlotWorker
from kvd.tiers.arena import Arena
from kvd.tiers.io_threads import IoPool
from kvd.tiers.manifest import Manifest
from kvd.tiers.volume import SegmentVolume
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout

MoveAction: TypeAlias = ReadBlock | VerifyExtent | WriteBlock | RelocateBlock
Performable: TypeAlias = (
    MoveAction | SlotAction | WriteJournal | TrackLoad | UntrackLoad | IndexAction
)

MAX_INDEX_BYTES = 1 << 20  # bytes of index entries put at once: a few milliseconds of the loop

log = get_logger(__name__)


@dataclass(frozen=True)
class LeaseHolders:
    """Lookups of the inference engines that hold leases, by engine id.

    Attributes:
        identity_of: returns the engine's process, for the journal.
        wake_of: returns a function that wakes the engine when a progress word of its loads has
            changed; any thread may call it.
    """

    identity_of: Callable[[int], ProcessIdentity]
    wake_of: Callable[[int], Callable[[], None]]


class Performer:
    """Performs the actions of one layout's cache engine.

    Actions on slots need an arena: see use_arena().

    Attributes:
        histograms: durations of reads and writes.
        loads: progress of loads that are under way.
        num_pending: number of operations that are not answered yet.
        num_uncommitted: number of blocks on SSD whose index entry is not committed: a restart would
            not find them.
    """

    def __init__(
        self,
        layout: KVLayout,
        volume: SegmentVolume,
        manifest: Manifest,
        io_pool: IoPool,
        lease_holders: LeaseHolders,
    ) -> None:
        self.histograms = IoHistograms()
        self.loads = LoadTracker(len(layout.layers), self.histograms)
        self.num_pending = 0
        self.num_uncommitted = 0
        self._fingerprint = layout.fingerprint
        self._manifest = manifest
        self._lease_holders = lease_holders
        self._arena: Arena | None = None
        self._complete: Callable[[Completion], None] | None = None
        # An item None means that the entry of a block is committed.
        self._completions: Completions[EndedOperations | None] = Completions(self._handle)
        report = self._completions.put
        self._reader = BlockReader(
            pool=io_pool,
            volume=volume,
            memory_of=self._memory,
            loads=self.loads,
            histograms=self.histograms,
            report=report,
        )
        self._writer = BlockWriter(
            pool=io_pool,
            volume=volume,
            name=f"kvd-sync-{layout.fingerprint[:6]}",
            memory_of=self._memory,
            histograms=self.histograms,
            report=report,
        )
        self._slot_worker = SlotWorker(
            layout=layout, pool=io_pool, arena=self._require_arena, loads=self.loads, report=report
        )
        self._awaits_room = False  # see await_room()

    def start(
        self, loop: asyncio.AbstractEventLoop, complete: Callable[[Completion], None]
    ) -> None:
        """Accept actions.

        Args:
            loop: the event loop.
            complete: called on the loop with the completion of ended operations.
        """
        self._complete = complete
        self._completions.start(loop)
        self._writer.syncer.start()

    def use_arena(self, arena: Arena | None) -> None:
        """Set the layout's arena, or None; then no slot may be in use, and no load tracked."""
        self._arena = arena
        self.loads.progress = None if arena is None else arena.progress

    def perform(self, action: Performable) -> None:
        """Start one action; returns at once."""
        match action:
            case WriteJournal(records):
                self._require_arena().journal.write(records, self._lease_holders.identity_of)
            case HashSlots() | VerifySlot() | CompactTokens() | WipeSlots():
                self.num_pending += 1
                self._slot_worker.begin(action)
            case TrackLoad(lease_id, engine_id, op_ids):
                self._reader.begin_load()
                self.loads.track(lease_id, op_ids, self._lease_holders.wake_of(engine_id))
                # Some of these operations may have begun before a load waited for them.
                self._reader.hurry(op_ids)
                self._slot_worker.hurry(op_ids)
            case UntrackLoad(lease_id):
                self.loads.untrack(lease_id)
            case ReadBlock() | VerifyExtent() | WriteBlock() | RelocateBlock():
                self.num_pending += 1
                self._move(action)
            case _:
                self._put_entry(action)

    @property
    def index_room(self) -> int:
        """Bytes of index entries that may be put now; 0: the index is behind, see await_room()."""
        return min(MAX_INDEX_BYTES, self._manifest.room_bytes)

    def await_room(self) -> None:
        """Have the engine called, and its actions drained, once all entries put are committed."""
        if not self._awaits_room:
            self._awaits_room = True
            room = EndedOperations(lambda _engine: self._has_room(), num_ops=0)
            self._manifest.when_committed(self._report_callback(room))

    async def close(self) -> None:
        """Sync all writes and report all ended operations; later ones are not reported.

        The caller closes the I/O pool before, and arena and files afterwards.
        """
        await asyncio.to_thread(self._writer.syncer.close)
        try:
            self._completions.close()
        except Exception:
            # A broken engine must not prevent the close of its arena.
            log.exception("completion_failed_at_close")

    def _move(self, action: MoveAction) -> None:
        """Begin to read or write a block."""
        match action:
            case ReadBlock():
                self._reader.read(action)
            case VerifyExtent():
                self._reader.verify(action)
            case WriteBlock():
                self._writer.write(action)
            case RelocateBlock():
                self._writer.relocate(action)

    def _put_entry(self, action: IndexAction) -> None:
        """Pass a change to the index, which applies changes in the order of the calls."""
        layout = self._fingerprint
        match action:
            case PutBlock(block):
                self.num_uncommitted += 1
                self._manifest.put_block(layout, block, self._report_callback(None))
            case ReplaceBlock(op_id, block):
                self.num_pending += 1
                replaced = EndedOperations(lambda engine: engine.relocations.replace_done(op_id))
                self._manifest.put_block(layout, block, self._report_callback(replaced))
            case PutSession(session):
                self._manifest.put_session(layout, session)
            case PutUse(key, last_access_ns):
                self._manifest.put_use(layout, key, last_access_ns)
            case DropSession(key):
                self._manifest.drop_session(layout, key)
            case DropBlock(op_id, key):
                self.num_pending += 1
                dropped = EndedOperations(lambda engine: engine.writes.drop_done(op_id))
                self._manifest.drop_block(layout, key, self._report_callback(dropped))
            case CommitIndex(op_id):
                self.num_pending += 1
                committed = EndedOperations(lambda engine: engine.compactions.commit_done(op_id))
                self._manifest.when_committed(self._report_callback(committed))

    def _report_callback(self, ended: EndedOperations | None) -> Callable[[], None]:
        return partial(self._completions.put, ended)

    def _require_arena(self) -> Arena:
        assert self._arena is not None, "slots exist where there is an arena"  # noqa: S101
        return self._arena

    def _memory(self, slot_id: int) -> memoryview:
        return self._require_arena().slots.slot(slot_id)

    # ------------------------------------------------------------------------------ on the loop

    def _has_room(self) -> None:
        self._awaits_room = False  # the cache drains the engine after every completion

    def _handle(self, ended: EndedOperations | None) -> None:
        """Report ended operations to the engine; None: the entry of a block is committed."""
        assert self._complete is not None, "the performer is started"  # noqa: S101
        if ended is None:
            self.num_uncommitted -= 1
            return
        self.num_pending -= ended.num_ops
        self._complete(ended.completion)
        # After the engine was called: it may have given the load another operation in its place.
        if ended.op_id is not None:
            self.loads.record_end(ended.op_id, is_good=ended.is_good)
