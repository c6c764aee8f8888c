"""Writes of one layout: through the I/O pool, then one sync for all that ended meanwhile.

Small blocks that lie side by side go in one write: as for the disk, so for the threads, it costs
less than several.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvd.core.records.actions import IoOutcome, WriteBlock
from kvd.core.records.entries import StoredBlock
from kvd.runtime.completions import Ended, IoHistograms, attempt
from kvd.tiers.direct_io import Staging
from kvd.tiers.extent_format import ToWrite
from kvd.tiers.io_threads import BatchWorker, IoPool, Priority
from kvd.tiers.volume import SegmentVolume, Written
from shared.types.units import SECTOR_BYTES

if TYPE_CHECKING:
    from kvd.core.engine import CacheEngine

MAX_RUN_BYTES = 4 << 20  # of blocks in one write, unless one alone has more
MAX_SYNC_BATCH = 64  # blocks in one sync: enough to share its cost, few enough to report soon


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
