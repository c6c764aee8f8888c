"""Carries out the cache engine's actions and brings the completions back to the loop.

    Read…, Verify…, HashSlot   the I/O pool, shared by all layouts; see its priorities
    WriteBlock                 the I/O pool, then this layout's syncer; see block_writing.py
    WipeSlots              the I/O pool, with writes
    CompactRows                the I/O pool, behind everything else
    PutSlot, ClearSlot         the journal, at once
    TrackLoad, UntrackLoad     the progress words, at once
    Put…, Drop…, CommitRows    the manifest's writer thread, in order, as it has room for them

Every action with an op_id is answered exactly once, on the event loop, whatever happens in the
thread. What may be under way is bounded by the engine: a read or write holds a slot, a drop an
extent.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from kvd.core.engine import CacheEngine
from kvd.core.records.actions import (
    ClearSlot,
    CommitRows,
    CompactRows,
    DropBlock,
    DropSession,
    HashSlot,
    IoOutcome,
    PutBlock,
    PutSession,
    PutSlot,
    PutUse,
    ReadBlock,
    TrackLoad,
    UntrackLoad,
    VerifyExtent,
    VerifySlot,
    WipeSlots,
    WriteBlock,
)
from kvd.core.records.records import SlotRecord, StoredBlock, WritingSlot
from kvd.host.process_identity import ProcessIdentity
from kvd.runtime.block_reading import BlockReading
from kvd.runtime.block_writing import BlockWriter
from kvd.runtime.completions import Completions
from kvd.runtime.hash_queue import HashQueue
from kvd.runtime.load_tracking import LoadTracker
from kvd.runtime.row_copying import RowCopier
from kvd.tiers.arena import Arena
from kvd.tiers.direct_io import Staging
from kvd.tiers.io_pool import IoPool, Priority
from kvd.tiers.manifest import Manifest
from kvd.tiers.slot_rows import BlockHasher
from kvd.tiers.tier_info import AHEAD, LOAD, IoHistograms
from kvd.tiers.volume import SegmentVolume
from shared.process.log import get_logger
from shared.types.kv_layout import KVLayout

Performable: TypeAlias = (
    ReadBlock
    | VerifySlot
    | VerifyExtent
    | HashSlot
    | WriteBlock
    | CompactRows
    | WipeSlots
    | PutSlot
    | ClearSlot
    | TrackLoad
    | UntrackLoad
    | PutBlock
    | PutSession
    | PutUse
    | DropSession
    | DropBlock
    | CommitRows
)
Completion: TypeAlias = Callable[[CacheEngine, int], None]  # called with the engine and now_ns

MAX_ROW_BYTES = 1 << 20  # of index rows at once: a few milliseconds of the loop

log = get_logger(__name__)


@dataclass(frozen=True)
class Owners:
    """What the performer asks about the engines that hold leases, by their owner id.

    Attributes:
        identity_of: the process, for the journal.
        wake_of: called when a progress word of one of its loads has changed; from any thread.
    """

    identity_of: Callable[[int], ProcessIdentity]
    wake_of: Callable[[int], Callable[[], None]]


class _Ended(NamedTuple):
    """Operations on their way to the engine; with an op_id it is one that loads may wait for."""

    completion: Completion
    op_id: int | None = None
    is_good: bool = True
    num_ops: int = 1


class Performer:
    """Performs the actions of one layout's engine. Slot operations need an arena: see use_arena."""

    def __init__(
        self,
        layout: KVLayout,
        volume: SegmentVolume,
        manifest: Manifest,
        io_pool: IoPool,
        owners: Owners,
    ) -> None:
        self._layout = layout
        self._volume = volume
        self._manifest = manifest
        self._io_pool = io_pool
        self._owners = owners
        self._hasher = BlockHasher(layout)
        self._copier = RowCopier(layout, self._memory)
        self._arena: Arena | None = None
        self._tracker: LoadTracker | None = None
        self._writer = BlockWriter(
            io_pool,
            volume,
            f"kvd-sync-{layout.fingerprint[:6]}",
            self._memory,
            self._writes_done,
        )
        self._hash_queue = HashQueue(io_pool, self._hash)
        self._complete: Callable[[Completion], None] | None = None
        self._completions: Completions[_Ended | None] = Completions(self._handle)
        self._load = io_pool.ticket()  # reads are ordered by the load they came with
        self._patient: dict[int, VerifySlot] = {}  # not begun; a load that comes to wait hurries it
        self._ahead: dict[int, BlockReading] = {}  # under way; the same
        self._write_began_s: dict[int, float] = {}  # by operation
        self.histograms = IoHistograms()
        self.num_pending = 0  # operations that will still be answered
        self.num_uncommitted = 0  # blocks on SSD that a restart would not find yet
        self._awaits_room = False  # see await_room

    def start(
        self, loop: asyncio.AbstractEventLoop, complete: Callable[[Completion], None]
    ) -> None:
        """Open for actions; `complete` is called on the loop for each that is done."""
        self._complete = complete
        self._completions.start(loop)
        self._writer.start()

    def use_arena(self, arena: Arena | None) -> None:
        """Take the layout's arena, or give it up: then no slot is in use and no load tracked."""
        self._arena = arena
        num_layers = len(self._layout.layers)
        self._tracker = (
            None if arena is None else LoadTracker(arena.progress, num_layers, self.histograms)
        )

    def progress_index(self, lease_id: int) -> int | None:
        """Index of a pending load's progress word; None if it has none."""
        return None if self._tracker is None else self._tracker.index_of(lease_id)

    def perform(self, action: Performable) -> None:
        """Start one action; returns at once."""
        match action:
            case PutSlot(slot_id, record):
                self._put_slot(slot_id, record)
            case ClearSlot(slot_id):
                self._slots().journal.clear(slot_id)
            case TrackLoad(lease_id, owner, op_ids):
                self._load = self._io_pool.ticket()
                self._loads().track(lease_id, op_ids, self._owners.wake_of(owner))
                self._hurry(op_ids)
            case UntrackLoad(lease_id):
                self._loads().untrack(lease_id)
            case PutBlock(block):
                self.num_uncommitted += 1
                self._manifest.put_block(self._layout.fingerprint, block, self._block_committed)
            case PutSession(session):
                self._manifest.put_session(self._layout.fingerprint, session)
            case PutUse(key, last_access_ns):
                self._manifest.put_use(self._layout.fingerprint, key, last_access_ns)
            case DropSession(key):
                self._manifest.drop_session(self._layout.fingerprint, key)
            case _:
                self.num_pending += 1
                self._begin(action)

    @property
    def row_room(self) -> int:
        """Bytes of index rows that may be put now; 0: the index is behind, see `await_room`."""
        return min(MAX_ROW_BYTES, self._manifest.room_bytes)

    def await_room(self) -> None:
        """Have the engine be called, and drained, once what was put so far is committed."""
        if not self._awaits_room:
            self._awaits_room = True
            room = _Ended(self._has_room, num_ops=0)
            self._manifest.when_committed(lambda: self._report(room))

    def close(self) -> None:
        """Sync and report the writes that have ended; blocks. The I/O pool is closed before."""
        self._writer.close()

    def finish(self) -> None:
        """Report what has ended, and nothing more: the arena and the files go. On the loop."""
        try:
            self._completions.close()
        except Exception:
            # The edge: an engine that is broken must not keep its arena from being closed.
            log.exception("completion_failed_at_close")

    # -------------------------------------------------------------------------------- operations

    def _hurry(self, op_ids: Sequence[int]) -> None:
        """A load waits for these operations now; some were begun when none did."""
        for op_id in op_ids:
            if op_id in self._patient:
                self._submit_patient(Priority.URGENT_VERIFY, op_id)
            elif op_id in self._ahead:
                self._ahead.pop(op_id).hurry(self._load)

    def _begin(
        self,
        action: ReadBlock
        | VerifySlot
        | VerifyExtent
        | HashSlot
        | WriteBlock
        | CompactRows
        | WipeSlots
        | DropBlock
        | CommitRows,
    ) -> None:
        """Start an action that is answered."""
        match action:
            case ReadBlock():
                self._read(action)
            case VerifySlot():
                self._verify_slot(action)
            case VerifyExtent():
                self._verify_extent(action)
            case HashSlot():
                self._hash_queue.put(action)
            case WriteBlock(op_id):
                self._write_began_s[op_id] = time.monotonic()
                self._writer.write(action)
            case CompactRows():
                self._io_pool.submit(Priority.BACKGROUND, 0, lambda _: self._compact(action))
            case WipeSlots():
                self._io_pool.submit(Priority.WRITE, 0, lambda _: self._wipe(action))
            case CommitRows(op_id):
                committed = _Ended(lambda engine, now_ns: engine.rows_committed(op_id, now_ns))
                self._manifest.when_committed(lambda: self._report(committed))
            case DropBlock(op_id, key):
                dropped = _Ended(lambda engine, now_ns: engine.drop_done(op_id, now_ns))
                self._manifest.drop_block(
                    self._layout.fingerprint, key, lambda: self._report(dropped)
                )

    def _read(self, action: ReadBlock) -> None:
        tracker, op_id, began_s = self._loads(), action.op_id, time.monotonic()
        tracker.begin(op_id)
        read = self._volume.reading(
            action.extent,
            action.key,
            action.num_tokens,
            self._memory(action.slot_id),
            layered=action.layered,
        )

        def done(outcome: IoOutcome, stored: StoredBlock | None) -> None:
            def complete(engine: CacheEngine, now_ns: int) -> None:
                purpose = AHEAD if action.ahead else LOAD
                self.histograms.read_s.observe(time.monotonic() - began_s, purpose)
                engine.read_done(op_id, outcome, stored, now_ns)

            self._report(_Ended(complete, op_id, outcome is IoOutcome.OK))

        def advanced(num_layers: int) -> None:
            tracker.advanced(op_id, num_layers)

        priority = Priority.READ_AHEAD if action.ahead else Priority.READ
        order = (self._load, op_id)
        reading = BlockReading(self._io_pool, read, priority, order, advanced, done)
        if action.ahead:
            self._ahead[op_id] = reading
        reading.start()

    def _verify_slot(self, action: VerifySlot) -> None:
        tracker = self._loads()
        tracker.begin(action.op_id)
        if action.urgent:
            self._io_pool.submit(Priority.URGENT_VERIFY, 0, lambda _: self._verify(action, tracker))
        else:
            self._patient[action.op_id] = action
            self._submit_patient(Priority.BACKGROUND, action.op_id)

    def _submit_patient(self, priority: Priority, op_id: int) -> None:
        """Queue a verification that may be queued already: whichever job is first makes it."""
        tracker = self._loads()

        def job(_staging: Staging) -> None:
            action = self._patient.pop(op_id, None)
            if action is not None:
                self._verify(action, tracker)

        self._io_pool.submit(priority, 0, job)

    def _verify_extent(self, action: VerifyExtent) -> None:
        read = self._volume.reading(
            action.extent, action.key, action.num_tokens, None, layered=False
        )

        def done(outcome: IoOutcome, _stored: StoredBlock | None) -> None:
            self._report(_verified(action.op_id, outcome))

        order = (0, action.op_id)
        BlockReading(self._io_pool, read, Priority.BACKGROUND, order, _ignore, done).start()

    def _put_slot(self, slot_id: int, record: SlotRecord) -> None:
        writer = None
        if isinstance(record, WritingSlot):
            writer = self._owners.identity_of(record.owner)
        self._slots().journal.put(slot_id, record, writer)

    def _slots(self) -> Arena:
        assert self._arena is not None, "slots exist where there is an arena"  # noqa: S101
        return self._arena

    def _loads(self) -> LoadTracker:
        assert self._tracker is not None, "slots exist where there is an arena"  # noqa: S101
        return self._tracker

    def _memory(self, slot_id: int) -> memoryview:
        return self._slots().slots.slot(slot_id)

    # ------------------------------------------------------------------------- in other threads

    def _hash(self, actions: Sequence[HashSlot]) -> None:
        hashed = [(action.op_id, self._checksums(action)) for action in actions]

        def complete(engine: CacheEngine, now_ns: int) -> None:
            for op_id, checksums in hashed:
                engine.hash_done(op_id, checksums, now_ns)

        self._report(_Ended(complete, num_ops=len(hashed)))

    def _checksums(self, action: HashSlot) -> bytes:
        try:
            return self._hasher.checksums(self._memory(action.slot_id), action.num_tokens)
        except Exception:
            # The edge: an op without an answer would hold its slot for ever.
            log.exception("hash_failed_unexpectedly", slot_id=action.slot_id)
            return b""

    def _verify(self, action: VerifySlot, tracker: LoadTracker) -> None:
        try:
            memory = self._memory(action.slot_id)
            is_good = self._hasher.matches(memory, action.num_tokens, action.checksums)
            outcome = IoOutcome.OK if is_good else IoOutcome.CORRUPT
        except Exception:
            # The edge, as above.
            log.exception("verify_failed_unexpectedly", slot_id=action.slot_id)
            outcome = IoOutcome.TRANSIENT
        if outcome is IoOutcome.OK:
            tracker.advanced(action.op_id, len(self._layout.layers))
        self._report(_verified(action.op_id, outcome))

    def _compact(self, action: CompactRows) -> None:
        checksums: list[bytes] = []
        try:
            made = self._copier.compact(action)
            outcome = IoOutcome.CORRUPT if made is None else IoOutcome.OK
            checksums = made or []
        except Exception:
            # The edge, as above.
            log.exception("compact_failed_unexpectedly", blocks=len(action.blocks))
            outcome = IoOutcome.TRANSIENT

        def complete(engine: CacheEngine, now_ns: int) -> None:
            engine.compact_done(action.op_id, outcome, checksums, now_ns)

        self._report(_Ended(complete))

    def _wipe(self, action: WipeSlots) -> None:
        outcome = IoOutcome.OK
        try:
            for slot_id in action.slot_ids:
                np.frombuffer(self._memory(slot_id), np.uint8).fill(0)  # gives the interpreter up
                self._slots().journal.wipe(slot_id)
        except Exception:
            # The edge, as above.
            log.exception("wipe_failed_unexpectedly", slots=len(action.slot_ids))
            outcome = IoOutcome.TRANSIENT

        def complete(engine: CacheEngine, now_ns: int) -> None:
            engine.wipe_done(action.op_id, outcome, now_ns)

        self._report(_Ended(complete))

    def _writes_done(self, outcomes: Sequence[tuple[int, IoOutcome]]) -> None:
        def complete(engine: CacheEngine, now_ns: int) -> None:
            now_s = time.monotonic()
            for op_id, outcome in outcomes:
                self.histograms.write_s.observe(now_s - self._write_began_s.pop(op_id))
                engine.write_done(op_id, outcome, now_ns)

        self._report(_Ended(complete, num_ops=len(outcomes)))

    def _block_committed(self) -> None:
        self._completions.put(None)

    def _report(self, ended: _Ended) -> None:
        self._completions.put(ended)

    # ------------------------------------------------------------------------------ on the loop

    def _has_room(self, _engine: CacheEngine, _now_ns: int) -> None:
        self._awaits_room = False  # it is drained after this call, as after any

    def _handle(self, ended: _Ended | None) -> None:
        """Tell the engine of an operation; None: a block's row is committed."""
        assert self._complete is not None, "the performer is started"  # noqa: S101
        if ended is None:
            self.num_uncommitted -= 1
            return
        self.num_pending -= ended.num_ops
        if ended.op_id is not None:
            self._ahead.pop(ended.op_id, None)
        self._complete(ended.completion)
        # After the engine has had its say: it may have given the load another operation.
        if ended.op_id is not None and self._tracker is not None:
            self._tracker.ended(ended.op_id, is_good=ended.is_good)


def _verified(op_id: int, outcome: IoOutcome) -> _Ended:
    def complete(engine: CacheEngine, now_ns: int) -> None:
        engine.verify_done(op_id, outcome, now_ns)

    return _Ended(complete, op_id, outcome is IoOutcome.OK)


def _ignore(_num_layers: int) -> None:
    """Nobody waits for the layers of a scrub."""
