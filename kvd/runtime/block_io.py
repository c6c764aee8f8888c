"""Block I/O of one layout: reads and writes between SSD and slots, through the I/O pool.

*Reads* fill slots for loads, or verify extents. The first group of layers is read alone, because it
includes the header, which has the checksums of the others; then all others are read at once. A read
completes when none of its groups is left, so that nothing writes to its slot any more. A read ahead
may be hurried when a load begins to wait for it: groups that have not begun are queued again with
higher priority, and the job that comes first reads the group.

*Writes* that ended while a sync was running share the next sync. Small blocks that lie side by side
on SSD share one write, which costs both the disk and the threads less than several.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvd.core.records.actions import (
    IoOutcome,
    ReadBlock,
    RelocateBlock,
    VerifyExtent,
    WriteBlock,
)
from kvd.core.records.entries import StoredBlock
from kvd.runtime.completions import (
    AHEAD,
    LOAD,
    EndedOperations,
    IoHistograms,
    run_guarded,
    verification_ended,
)
from kvd.runtime.load_tracking import LoadTracker
from kvd.tiers.direct_io import Staging
from kvd.tiers.extent_format import ToWrite
from kvd.tiers.extent_read import ExtentRead
from kvd.tiers.io_threads import BatchWorker, IoPool, Priority
from kvd.tiers.volume import SegmentVolume, Written
from shared.types.units import SECTOR_BYTES

if TYPE_CHECKING:
    from kvd.core.engine import CacheEngine

OnDone: TypeAlias = Callable[[IoOutcome, StoredBlock | None], None]
MAX_RUN_BYTES = 4 << 20  # bytes of blocks in one write, unless a single block has more
MAX_SYNC_BATCH = 64  # blocks in one sync: enough to share its cost, few enough to report soon


class GroupedRead:
    """The read of one block, group by group.

    Args:
        pool: pool that runs the groups.
        read: planned read of the extent.
        priority: priority in the pool.
        order: numbers of the load and of the operation. The group's index goes between them, so
            that the first layers of all blocks of a load are read first.
        on_progress: called with n once layers [0, n) are read and verified; in a thread of the
            pool.
        on_done: called once with the outcome, in a thread of the pool.
    """

    def __init__(
        self,
        pool: IoPool,
        read: ExtentRead,
        priority: Priority,
        order: tuple[int, int],
        on_progress: Callable[[int], None],
        on_done: OnDone,
    ) -> None:
        self._pool = pool
        self._read: ExtentRead | None = read
        self._groups = read.groups
        self._priority = priority
        self._order = order
        self._on_progress = on_progress
        self._on_done = on_done
        self._lock = threading.Lock()
        self._outcomes: list[IoOutcome | None] = [None] * len(read.groups)
        self._queued: set[int] = set()  # groups that have not begun
        self._num_unfinished = 1  # groups that are queued or running
        self._num_ready = 0  # groups [0, _num_ready) are read and verified

    def start(self) -> None:
        """Begin the read; returns at once."""
        with self._lock:
            self._queued.add(0)
        self._submit(0)

    def hurry(self, load: int) -> None:
        """Raise the priority of groups that have not begun.

        Args:
            load: number of the load that waits for them now, for `order`.
        """
        with self._lock:
            if self._priority is Priority.READ:
                return
            self._priority = Priority.READ
            self._order = load, self._order[1]
            queued = sorted(self._queued)
        for index in queued:
            self._submit(index)

    def _submit(self, index: int) -> None:
        load, block = self._order
        num_bytes = self._groups[index].num_bytes
        job = partial(self._run, index)
        self._pool.submit(self._priority, num_bytes, job, (load, index, block))

    def _run(self, index: int, staging: Staging) -> None:
        with self._lock:
            if index not in self._queued:
                return  # the group was queued twice, and the other job has read it
            self._queued.discard(index)
        read = self._read
        assert read is not None, "a group is read before the last one ends"  # noqa: S101
        outcome = IoOutcome.OK
        if self._failure() is None:
            outcome = run_guarded(
                "read_failed_unexpectedly", lambda: read.run(index, staging), IoOutcome.TRANSIENT
            )
        more = range(1, len(self._groups)) if index == 0 and outcome is IoOutcome.OK else ()
        with self._lock:
            self._outcomes[index] = outcome
            self._queued.update(more)
            self._num_unfinished += len(more) - 1
            is_last = not self._num_unfinished
            if self._failure() is None:
                self._report_progress()
        for next_index in more:
            self._submit(next_index)
        if is_last:
            # The slower of two jobs of a hurried group may still be queued: it must hold no slot.
            self._read = None
            failure = self._failure()
            self._on_done(failure or IoOutcome.OK, None if failure else read.stored)

    def _report_progress(self) -> None:
        """Report the groups from the first on that are ready without a gap."""
        before = self._num_ready
        while (
            self._num_ready < len(self._outcomes)
            and self._outcomes[self._num_ready] is IoOutcome.OK
        ):
            self._num_ready += 1
        if self._num_ready > before:
            self._on_progress(self._groups[self._num_ready - 1].layers.stop)

    def _failure(self) -> IoOutcome | None:
        """Return the outcome of the first failed group; None if none has failed."""
        failed = (o for o in self._outcomes if o not in (None, IoOutcome.OK))
        return next(failed, None)


class BlockReader:
    """The reads of one layout. Its methods are called on the event loop.

    Args:
        pool: pool that runs the reads.
        volume: volume to read from.
        memory_of: returns the memory of a slot.
        loads: tracks the reads that loads may wait for.
        histograms: observe how long reads take.
        report: called with the ended read, in any thread.
    """

    def __init__(
        self,
        pool: IoPool,
        volume: SegmentVolume,
        memory_of: Callable[[int], memoryview],
        loads: LoadTracker,
        histograms: IoHistograms,
        report: Callable[[EndedOperations], None],
    ) -> None:
        self._pool = pool
        self._volume = volume
        self._memory_of = memory_of
        self._loads = loads
        self._histograms = histograms
        self._report = report
        self._load = pool.ticket()  # number of the newest load: orders the reads of loads
        self._ahead: dict[int, GroupedRead] = {}  # operation → read ahead that is under way

    def begin_load(self) -> None:
        """Order all reads from here on behind those of earlier loads."""
        self._load = self._pool.ticket()

    def hurry(self, op_ids: Iterable[int]) -> None:
        """Turn reads ahead among these operations into reads that the newest load waits for."""
        for op_id in op_ids:
            if op_id in self._ahead:
                self._ahead.pop(op_id).hurry(self._load)

    def read(self, action: ReadBlock) -> None:
        """Begin to read a block into its slot; returns at once."""
        op_id, began_s = action.op_id, time.monotonic()
        self._loads.begin(op_id)
        read = self._volume.plan_read(
            action.extent,
            action.key,
            action.num_tokens,
            self._memory_of(action.slot_id),
            layered=action.layered,
        )

        def on_done(outcome: IoOutcome, stored: StoredBlock | None) -> None:
            def complete(engine: "CacheEngine") -> None:
                self._ahead.pop(op_id, None)
                purpose = AHEAD if action.ahead else LOAD
                self._histograms.read_s.observe(time.monotonic() - began_s, purpose)
                engine.arrivals.read_done(op_id, outcome, stored)

            self._report(EndedOperations(complete, op_id, outcome is IoOutcome.OK))

        priority = Priority.READ_AHEAD if action.ahead else Priority.READ
        order = (self._load, op_id)
        on_progress = partial(self._loads.record_progress, op_id)
        grouped_read = GroupedRead(self._pool, read, priority, order, on_progress, on_done)
        if action.ahead:
            self._ahead[op_id] = grouped_read
        grouped_read.start()

    def verify(self, action: VerifyExtent) -> None:
        """Begin to verify an extent, without a slot; returns at once."""
        read = self._volume.plan_read(
            action.extent, action.key, action.num_tokens, None, layered=False
        )

        def on_done(outcome: IoOutcome, _stored: StoredBlock | None) -> None:
            self._report(verification_ended(action.op_id, outcome))

        order = (0, action.op_id)
        GroupedRead(self._pool, read, Priority.BACKGROUND, order, _ignore_progress, on_done).start()


def _ignore_progress(_num_layers: int) -> None:
    """Do nothing: no load waits for the layers of a scrub."""


class _Operation(NamedTuple):
    """A write, or a copy of an extent, that is under way."""

    op_id: int
    began_s: float
    is_copy: bool


class BlockWriter:
    """The writes of one layout, copies of extents among them, and the thread that syncs them.

    Args:
        pool: pool that runs the writes.
        volume: volume to write to.
        name: name of the syncer's thread.
        memory_of: returns the memory of a slot.
        histograms: observe how long writes take.
        report: called with ended writes, in any thread; a write that is OK is durable.

    Attributes:
        syncer: thread that makes writes durable and reports them. The owner starts it before the
            first write, and closes it after the pool.
    """

    def __init__(
        self,
        pool: IoPool,
        volume: SegmentVolume,
        name: str,
        memory_of: Callable[[int], memoryview],
        histograms: IoHistograms,
        report: Callable[[EndedOperations], None],
    ) -> None:
        self._pool = pool
        self._volume = volume
        self._memory_of = memory_of
        self._histograms = histograms
        self._report = report
        self._waiting: deque[tuple[_Operation, WriteBlock]] = deque()
        self._lock = threading.Lock()  # one thread at a time takes a run of waiting writes
        self.syncer: BatchWorker[tuple[_Operation, Written]] = BatchWorker(
            name, self._sync, MAX_SYNC_BATCH
        )

    def write(self, action: WriteBlock) -> None:
        """Begin a write; returns at once."""
        operation = _Operation(action.op_id, time.monotonic(), is_copy=False)
        num_bytes = self._volume.shape.num_sectors(action.num_tokens) * SECTOR_BYTES
        self._waiting.append((operation, action))
        # There are as many jobs as blocks, though one job may write several. So bytes in flight
        # exceed the budget by MAX_RUN_BYTES per thread at most, and a job that finds no block left
        # costs nothing.
        self._pool.submit(Priority.WRITE, num_bytes, self._job)

    def relocate(self, action: RelocateBlock) -> None:
        """Begin to copy an extent; returns at once."""
        operation = _Operation(action.op_id, time.monotonic(), is_copy=True)
        num_bytes = self._volume.shape.num_sectors(action.num_tokens) * SECTOR_BYTES
        self._pool.submit(Priority.BACKGROUND, num_bytes, partial(self._copy, operation, action))

    def _copy(self, operation: _Operation, action: RelocateBlock, staging: Staging) -> None:
        written = run_guarded(
            "copy_failed_unexpectedly",
            lambda: self._volume.copy(action.source, action.extent, action.num_tokens, staging),
            Written(IoOutcome.TRANSIENT, 0, 0),
            extent=action.extent,
        )
        if written.outcome is IoOutcome.OK:
            self.syncer.put((operation, written))
        else:
            self._report_ended([(operation, written.outcome)])

    def _job(self, staging: Staging) -> None:
        """Write the block that has waited longest, and those that follow it on SSD."""
        run = self._take_run()
        if not run:
            return
        written = run_guarded(
            "write_failed_unexpectedly",
            lambda: self._volume.write([self._to_write(action) for _, action in run], staging),
            Written(IoOutcome.TRANSIENT, 0, 0),
            extent=run[0][1].extent,
        )
        if written.outcome is IoOutcome.OK:
            for operation, _ in run:
                self.syncer.put((operation, written))
        else:
            self._report_ended([(operation, written.outcome) for operation, _ in run])

    def _take_run(self) -> list[tuple[_Operation, WriteBlock]]:
        run: list[tuple[_Operation, WriteBlock]] = []
        max_blocks = max(1, MAX_RUN_BYTES // self._volume.shape.full_bytes)
        with self._lock:
            while self._waiting and len(run) < max_blocks:
                if run and not self._volume.follows(self._waiting[0][1], run[-1][1]):
                    break
                run.append(self._waiting.popleft())
        return run

    def _to_write(self, action: WriteBlock) -> ToWrite:
        return ToWrite(
            extent=action.extent,
            key=action.key,
            num_tokens=action.num_tokens,
            stored=StoredBlock(action.token_ids, action.checksums),
            memory=self._memory_of(action.slot_id),
            tenant=action.tenant,
        )

    def _sync(self, batch: list[tuple[_Operation, Written]]) -> None:
        operations, written = zip(*batch, strict=True)
        outcomes = run_guarded(
            "sync_failed_unexpectedly",
            lambda: self._volume.sync(written),
            [IoOutcome.TRANSIENT] * len(batch),
            blocks=len(batch),
        )
        self._report_ended(list(zip(operations, outcomes, strict=True)))

    def _report_ended(self, outcomes: Sequence[tuple[_Operation, IoOutcome]]) -> None:
        def complete(engine: "CacheEngine") -> None:
            now_s = time.monotonic()
            for (op_id, began_s, is_copy), outcome in outcomes:
                if is_copy:
                    engine.relocations.relocate_done(op_id, outcome)
                else:
                    self._histograms.write_s.observe(now_s - began_s)
                    engine.writes.write_done(op_id, outcome)

        self._report(EndedOperations(complete, num_ops=len(outcomes)))
