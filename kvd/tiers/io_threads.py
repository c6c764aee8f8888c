"""Threads of the tiers: a pool for the I/O and hashing of all layouts, and batch workers.

The pool has a bounded number of threads, and serves jobs by priority:

    READ            a load waits for it; ordered by (load, group of layers, block)
    URGENT_VERIFY   a load waits for the check of a slot's bytes
    READ_AHEAD      a load may come
    WRITE
    HASH            a stored block waits to be written
    BACKGROUND      scrubbing, copies of extents

Invariants of the pool:
1. The first job in this order is the next to start. It waits while its bytes would exceed the
   budget in flight, unless nothing is in flight. Meanwhile blocks are hashed, which needs no I/O.
   Writes go before hashes, so that the disk is busy from the first hashed block on.
2. *Patient* jobs are those that no load waits for. While some of them run, one more thread than
   configured is available to the other jobs, and half of the budget in flight is reserved for
   those: a load does not wait for the end of a write or of a read ahead.
3. At most half of the threads read ahead, and no read ahead begins while a load reads. So a load
   shares the disk with few of them, for a moment. Writes continue beside loads.

A batch worker is one thread that takes everything queued at once, in the order of the queue: the
shape of a group commit.

The queues have no bounds of their own; their callers bound them. A job holds a slot, or is one of a
bounded number of bytes to scrub or copy; the manifest counts rows of the index.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from kvd.tiers.direct_io import Staging
from shared.process.log import get_logger

T = TypeVar("T")
Job: TypeAlias = Callable[[Staging], None]

log = get_logger(__name__)


class Priority(IntEnum):
    """Priority of a job; the smallest goes first."""

    READ = 0
    URGENT_VERIFY = 1
    READ_AHEAD = 2
    WRITE = 3
    HASH = 4
    BACKGROUND = 5


PATIENT = (Priority.READ_AHEAD, Priority.WRITE, Priority.BACKGROUND)  # no load waits for these


def _finished_job(_staging: Staging) -> None:
    """Replace a job that has run."""


class _Queued(NamedTuple):
    """A job in the heap; `number` is unique, so that jobs themselves are never compared."""

    priority: Priority
    order: tuple[int, ...]
    number: int
    num_bytes: int
    job: Job


class IoPool:
    """A bounded pool of threads that serves jobs by priority. Any thread may call any method.

    Args:
        num_threads: number of jobs that run at once, without the extra thread of invariant 2.
        max_bytes_in_flight: budget of bytes of I/O that has begun and not ended.
    """

    def __init__(self, num_threads: int, max_bytes_in_flight: int) -> None:
        self._num_threads = num_threads
        self._max_ahead = max(1, num_threads // 2)
        self._max_bytes = max_bytes_in_flight
        self._queue: list[_Queued] = []  # a heap
        # A heap of its own: a read ahead that may not start must not hold up the writes behind it.
        self._ahead: list[_Queued] = []
        self._hashes: deque[_Queued] = deque()
        self._num_queued = 0  # since the start
        self._tickets = itertools.count()
        self._bytes_in_flight = 0
        self._num_running = 0
        self._num_patient = 0  # running patient jobs
        self._num_ahead = 0  # running reads ahead
        self._num_reads = 0  # running reads that loads wait for
        self._patient_bytes = 0  # bytes in flight of patient jobs
        self._changed = threading.Condition()
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of I/O that has begun and not ended."""
        return self._bytes_in_flight

    def __len__(self) -> int:
        """Count the jobs that have not begun."""
        return len(self._queue) + len(self._ahead) + len(self._hashes)

    def start(self) -> None:
        """Start the threads."""
        for index in range(self._num_threads + 1):
            thread = threading.Thread(target=self._run, name=f"kvd-io-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ticket(self) -> int:
        """Return a number for `order` that is greater than all before.

        All layouts draw from here, so that their jobs are served in the order of arrival.
        """
        return next(self._tickets)

    def submit(
        self, priority: Priority, num_bytes: int, job: Job, order: tuple[int, ...] = ()
    ) -> None:
        """Queue a job; never blocks.

        Args:
            priority: class of the job, see the module docstring.
            num_bytes: bytes of I/O that the job does; 0 for work without I/O.
            job: called in a thread of the pool with that thread's staging buffer. It must not
                raise: an exception is only logged.
            order: among jobs of the same priority the least goes first, then the earliest.
        """
        with self._changed:
            self._num_queued += 1
            queued = _Queued(priority, order, self._num_queued, num_bytes, job)
            if priority is Priority.HASH:
                self._hashes.append(queued)
            else:
                is_ahead = priority is Priority.READ_AHEAD
                heapq.heappush(self._ahead if is_ahead else self._queue, queued)
            self._wake()

    def close(self) -> None:
        """Drop jobs that have not begun, and wait for those that have; blocks."""
        with self._changed:
            self._closing = True
            for queue in (self._queue, self._ahead, self._hashes):
                queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        staging = Staging()
        ended: _Queued | None = None
        while (queued := self._wait_for_job(ended)) is not None:
            try:
                queued.job(staging)
            except Exception:
                # The thread outlives a faulty job.
                log.exception("io_job_failed", priority=queued.priority.name)
            # Drop the reference to the job before waiting: it may hold a slot, and with it an
            # arena that is abandoned meanwhile.
            ended = queued._replace(job=_finished_job)
            del queued

    def _wait_for_job(self, ended: _Queued | None) -> _Queued | None:
        """Record the end of a job and wait for the next one; return None when the pool closes."""
        with self._changed:
            if ended is not None:
                self._count(ended, -1)
            while not self._closing:
                queued = self._startable_job()
                if queued is not None:
                    self._take(queued)
                    # One end may make room for several jobs: each thread wakes the next one.
                    self._wake()
                    return queued
                self._changed.wait()
        return None

    def _startable_job(self) -> _Queued | None:
        """Return the job to start now; None if none can start."""
        first = self._queue[0] if self._queue else None
        is_load = first is not None and first.priority < Priority.READ_AHEAD
        if not is_load and self._ahead and self._may_start(self._ahead[0]):
            return self._ahead[0]
        may_start = first is not None and self._may_start(first)
        if first is not None and may_start and first.priority < Priority.BACKGROUND:
            return first
        if self._hashes and self._may_start(self._hashes[0]):
            return self._hashes[0]
        return first if may_start else None

    def _take(self, queued: _Queued) -> None:
        if queued.priority is Priority.HASH:
            self._hashes.popleft()
        else:
            is_ahead = queued.priority is Priority.READ_AHEAD
            heapq.heappop(self._ahead if is_ahead else self._queue)
        self._count(queued, 1)

    def _wake(self) -> None:
        """Wake a thread if a job can start: a needless wake-up costs as much as a small I/O."""
        if self._startable_job() is not None:
            self._changed.notify()

    def _may_start(self, queued: _Queued) -> bool:
        in_flight = self._bytes_in_flight
        if in_flight and in_flight + queued.num_bytes > self._max_bytes:
            return False
        if queued.priority not in PATIENT:
            return self._num_running < self._num_threads + (self._num_patient > 0)
        in_flight = self._patient_bytes
        if in_flight and in_flight + queued.num_bytes > self._max_bytes // 2:
            return False
        if queued.priority is Priority.READ_AHEAD:
            must_wait = self._num_reads or self._num_ahead >= self._max_ahead
            if must_wait:
                return False
        return self._num_running < self._num_threads

    def _count(self, queued: _Queued, sign: int) -> None:
        self._num_running += sign
        self._bytes_in_flight += sign * queued.num_bytes
        if queued.priority in PATIENT:
            self._num_patient += sign
            self._patient_bytes += sign * queued.num_bytes
        if queued.priority is Priority.READ_AHEAD:
            self._num_ahead += sign
        elif queued.priority is Priority.READ:
            self._num_reads += sign


class BatchWorker(Generic[T]):
    """A thread that handles queued items in batches.

    Two batches begin at least `gather_s` apart, so that many items share a batch under load. After
    a pause an item is handled at once.

    Args:
        name: name of the thread.
        handle: called with each batch in the worker's thread. It must not raise: that ends the
            thread.
        max_batch: most items of a batch.
        gather_s: least seconds between the beginnings of two batches.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[list[T]], None],
        max_batch: int,
        gather_s: float = 0.0,
    ) -> None:
        self._gather_s = gather_s
        self._handle = handle
        self._max_batch = max_batch
        self._items: deque[T] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue an item; never blocks."""
        with self._wake:
            self._items.append(item)
            self._wake.notify()

    def __len__(self) -> int:
        return len(self._items)

    def close(self, *, discard: bool = False) -> None:
        """Handle all queued items, or discard them, then end the thread; blocks until it ends."""
        with self._wake:
            self._closing = True
            if discard:
                self._items.clear()
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        begun_at = -self._gather_s
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._items or self._closing)
            early_s = begun_at + self._gather_s - time.monotonic()
            if early_s > 0 and not self._closing:
                time.sleep(early_s)
            begun_at = time.monotonic()
            with self._wake:
                if not self._items:
                    return
                num_taken = min(len(self._items), self._max_batch)
                batch = [self._items.popleft() for _ in range(num_taken)]
            self._handle(batch)
