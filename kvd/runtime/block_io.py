"""Reads and writes of one layout, through the I/O pool.

Reads, into slots for loads, and to verify what is on SSD: the first group of layers of a block is
read alone, then all others at once, because the header in the first group says how the others are
verified. A read is answered when no group of it is left, so that nothing writes to its slot any
more. A read ahead of loads may be hurried: a load has come to wait for it. What of it is not begun
is then queued once more, and whichever of the two jobs comes first does it.

Writes go to one sync for all that ended meanwhile. Small blocks that lie side by side go in one
write: as for the disk, so for the threads, it costs less than several.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvd.core.records.actions import IoOutcome, ReadBlock, VerifyExtent, WriteBlock
from kvd.core.records.entries import StoredBlock
from kvd.runtime.completions import AHEAD, LOAD, Ended, IoHistograms, attempt, verified
from kvd.runtime.load_tracking import LoadTracker
from kvd.tiers.direct_io import Staging
from kvd.tiers.extent_format import ToWrite
from kvd.tiers.extent_read import ExtentRead
from kvd.tiers.io_threads import BatchWorker, IoPool, Priority
from kvd.tiers.volume import SegmentVolume, Written
from shared.types.units import SECTOR_BYTES

if TYPE_CHECKING:
    from kvd.core.engine import CacheEngine

Done: TypeAlias = Callable[[IoOutcome, StoredBlock | None], None]
MAX_RUN_BYTES = 4 << 20  # of blocks in one write, unless one alone has more
MAX_SYNC_BATCH = 64  # blocks in one sync: enough to share its cost, few enough to report soon


class BlockReading:
    """One read, group by group.

    Args:
        pool: runs the groups.
        read: what to read.
        priority: in the pool.
        order: the load and the block; the group goes between them, so that of several blocks the
            first layers come first.
        advanced: called with how many layers, from the first on, are there; in a thread of
            the pool.
        done: the answer, in a thread of the pool.
    """

    def __init__(
        self,
        pool: IoPool,
        read: ExtentRead,
        priority: Priority,
        order: tuple[int, int],
        advanced: Callable[[int], None],
        done: Done,
    ) -> None:
        self._pool = pool
        self._read: ExtentRead | None = read
        self._groups = read.groups
        self._priority = priority
        self._order = order
        self._advanced = advanced
        self._done = done
        self._lock = threading.Lock()
        self._outcomes: list[IoOutcome | None] = [None] * len(read.groups)
        self._queued: set[int] = set()  # groups that are not begun
        self._num_running = 1  # queued ones included
        self._num_good = 0  # groups, from the first on

    def start(self) -> None:
        """Begin; returns at once."""
        with self._lock:
            self._queued.add(0)
        self._submit(0)

    def hurry(self, load: int) -> None:
        """Have what is not begun read for a load that waits, as `order` says."""
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
                return  # hurried, and done by the other job
            self._queued.discard(index)
        read = self._read
        assert read is not None, "a group is read before the last one ends"  # noqa: S101
        outcome = IoOutcome.OK
        if self._failure() is None:
            outcome = attempt(
                "read_failed_unexpectedly", lambda: read.run(index, staging), IoOutcome.TRANSIENT
            )
        more = range(1, len(self._groups)) if index == 0 and outcome is IoOutcome.OK else ()
        with self._lock:
            self._outcomes[index] = outcome
            self._queued.update(more)
            self._num_running += len(more) - 1
            is_last = not self._num_running
            if self._failure() is None:
                self._advance()
        for following in more:
            self._submit(following)
        if is_last:
            self._read = None  # a job that was hurried past is still queued: it must hold no slot
            failure = self._failure()
            self._done(failure or IoOutcome.OK, None if failure else read.stored)

    def _advance(self) -> None:
        """Report the groups that are there without a gap."""
        before = self._num_good
        while (
            self._num_good < len(self._outcomes) and self._outcomes[self._num_good] is IoOutcome.OK
        ):
            self._num_good += 1
        if self._num_good > before:
            self._advanced(self._groups[self._num_good - 1].layers.stop)

    def _failure(self) -> IoOutcome | None:
        """Return the outcome of the first group that failed."""
        failed = (o for o in self._outcomes if o not in (None, IoOutcome.OK))
        return next(failed, None)


class BlockReader:
    """The reads of one layout. On the event loop.

    Args:
        pool: runs them.
        volume: what is read.
        memory_of: slot id → its memory.
        loads: is shown the reads that loads may wait for.
        histograms: observe how long reads take.
        report: takes what has ended, in some thread.
    """

    def __init__(
        self,
        pool: IoPool,
        volume: SegmentVolume,
        memory_of: Callable[[int], memoryview],
        loads: LoadTracker,
        histograms: IoHistograms,
        report: Callable[[Ended], None],
    ) -> None:
        self._pool = pool
        self._volume = volume
        self._memory_of = memory_of
        self._loads = loads
        self._histograms = histograms
        self._report = report
        self._load = pool.ticket()  # reads are ordered by the load they came with
        self._ahead: dict[int, BlockReading] = {}  # under way; a load that comes to wait hurries it

    def begin_load(self) -> None:
        """Order the reads from here on behind those of the loads before."""
        self._load = self._pool.ticket()

    def hurry(self, op_ids: Iterable[int]) -> None:
        """Read what of these is read ahead for the load that has begun: it waits for it now."""
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

        def done(outcome: IoOutcome, stored: StoredBlock | None) -> None:
            def complete(engine: "CacheEngine") -> None:
                self._ahead.pop(op_id, None)
                purpose = AHEAD if action.ahead else LOAD
                self._histograms.read_s.observe(time.monotonic() - began_s, purpose)
                engine.arrivals.read_done(op_id, outcome, stored)

            self._report(Ended(complete, op_id, outcome is IoOutcome.OK))

        priority = Priority.READ_AHEAD if action.ahead else Priority.READ
        order = (self._load, op_id)
        advanced = partial(self._loads.advanced, op_id)
        reading = BlockReading(self._pool, read, priority, order, advanced, done)
        if action.ahead:
            self._ahead[op_id] = reading
        reading.start()

    def verify(self, action: VerifyExtent) -> None:
        """Begin to read a block only to see that it is good; returns at once."""
        read = self._volume.plan_read(
            action.extent, action.key, action.num_tokens, None, layered=False
        )

        def done(outcome: IoOutcome, _stored: StoredBlock | None) -> None:
            self._report(verified(action.op_id, outcome))

        order = (0, action.op_id)
        BlockReading(self._pool, read, Priority.BACKGROUND, order, _ignore, done).start()


def _ignore(_num_layers: int) -> None:
    """Nobody waits for the layers of a scrub."""


class BlockWriter:
    """See the module docstring.

    Args:
        pool: runs the writes.
        volume: written to.
        name: the name of the syncer's thread.
        memory_of: slot id → its memory.
        histograms: observe how long writes take.
        report: takes what has ended, in some thread; OK means that it is durable.

    Attributes:
        syncer: makes durable, and reports, what was written; to be started before the first write,
            and closed after the pool.
    """

    def __init__(
        self,
        pool: IoPool,
        volume: SegmentVolume,
        name: str,
        memory_of: Callable[[int], memoryview],
        histograms: IoHistograms,
        report: Callable[[Ended], None],
    ) -> None:
        self._pool = pool
        self._volume = volume
        self._memory_of = memory_of
        self._histograms = histograms
        self._report = report
        self._began_s: dict[int, float] = {}  # by operation
        self._waiting: deque[WriteBlock] = deque()
        self._lock = threading.Lock()  # guards the taking of runs
        self.syncer: BatchWorker[tuple[int, Written]] = BatchWorker(
            name, self._sync, MAX_SYNC_BATCH
        )

    def write(self, action: WriteBlock) -> None:
        """Begin a write; returns at once."""
        self._began_s[action.op_id] = time.monotonic()
        num_bytes = self._volume.shape.num_sectors(action.num_tokens) * SECTOR_BYTES
        self._waiting.append(action)
        # As many jobs as blocks, though one may take several: what is in flight stays within the
        # budget but for MAX_RUN_BYTES a thread, and a job that finds nothing left costs nothing.
        self._pool.submit(Priority.WRITE, num_bytes, self._job)

    def _job(self, staging: Staging) -> None:
        """Write what has waited longest, with what follows it on SSD."""
        run = self._take_run()
        if not run:
            return
        written = attempt(
            "write_failed_unexpectedly",
            lambda: self._volume.write([self._to_write(action) for action in run], staging),
            Written(IoOutcome.TRANSIENT, 0, 0),
            extent=run[0].extent,
        )
        if written.outcome is IoOutcome.OK:
            for action in run:
                self.syncer.put((action.op_id, written))
        else:
            self._done([(action.op_id, written.outcome) for action in run])

    def _take_run(self) -> list[WriteBlock]:
        run: list[WriteBlock] = []
        max_blocks = max(1, MAX_RUN_BYTES // self._volume.shape.full_bytes)
        with self._lock:
            while self._waiting and len(run) < max_blocks:
                if run and not self._volume.follows(self._waiting[0], run[-1]):
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

    def _sync(self, batch: list[tuple[int, Written]]) -> None:
        op_ids, written = zip(*batch, strict=True)
        outcomes = attempt(
            "sync_failed_unexpectedly",
            lambda: self._volume.sync(written),
            [IoOutcome.TRANSIENT] * len(batch),
            blocks=len(batch),
        )
        self._done(list(zip(op_ids, outcomes, strict=True)))

    def _done(self, outcomes: Sequence[tuple[int, IoOutcome]]) -> None:
        def complete(engine: "CacheEngine") -> None:
            now_s = time.monotonic()
            for op_id, outcome in outcomes:
                self._histograms.write_s.observe(now_s - self._began_s.pop(op_id))
                engine.writes.write_done(op_id, outcome)

        self._report(Ended(complete, num_ops=len(outcomes)))
