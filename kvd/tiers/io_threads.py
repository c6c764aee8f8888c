"""Threads of the tiers: a pool for all layouts' I/O and hashing, and workers that take batches.

The pool is bounded, and serves by priority:

    READ            a load waits: ordered by (load, group of layers, block)
    URGENT_VERIFY   a load waits for a slot's bytes to be checked
    READ_AHEAD      a load may come
    WRITE
    HASH            a stored block waits to be written
    BACKGROUND      scrubbing

Invariants of the pool:
1. the first job in this order is the next to start; it waits when its bytes would exceed the budget
   in flight, unless nothing is in flight; meanwhile blocks are hashed, which takes no I/O. Writes
   go before hashes, so that the disk is busy from the first hashed block on;
2. while jobs run that nobody waits for, one more thread than configured stands by for the others,
   and half of the budget is theirs: a load does not wait for the end of a write or of what is read
   ahead;
3. half of the threads read ahead, at most, and none begins while a load reads: it shares the disk
   with few of them, and for a moment. Writes continue beside them.

A batch worker is one thread that takes everything queued at once, in the order it was put: the
shape of a group commit.

No queue here has a bound of its own: what may be put is bounded by the caller. A job holds a slot,
or is one scrub; an SSD write holds a slot, an index row is counted by the manifest.
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
    """Who goes first."""

    READ = 0
    URGENT_VERIFY = 1
    READ_AHEAD = 2
    WRITE = 3
    HASH = 4
    BACKGROUND = 5


PATIENT = (Priority.READ_AHEAD, Priority.WRITE, Priority.BACKGROUND)  # nobody waits for them


def _done(_staging: Staging) -> None:
    """Stand in for a job that has run."""


class _Queued(NamedTuple):
    """A job in the heap; `number` is unique, so that jobs themselves are never compared."""

    priority: Priority
    order: tuple[int, ...]
    number: int
    num_bytes: int
    job: Job


class IoPool:
    """The pool; see the module docstring. For any thread.

    Args:
        num_threads: how many jobs run at once, but for the thread that stands by.
        max_bytes_in_flight: most bytes of I/O that has begun and not ended.
    """

    def __init__(self, num_threads: int, max_bytes_in_flight: int) -> None:
        self._num_threads = num_threads
        self._most_ahead = max(1, num_threads // 2)
        self._max_bytes = max_bytes_in_flight
        self._queue: list[_Queued] = []  # a heap
        self._ahead: list[_Queued] = []  # a heap; apart, because its bound must not hold up writes
        self._hashes: deque[_Queued] = deque()
        self._num_queued = 0  # ever
        self._tickets = itertools.count()
        self._bytes_in_flight = 0
        self._num_running = 0
        self._num_patient = 0  # jobs that run and nobody waits for
        self._num_ahead = 0  # of these, reads ahead
        self._num_reads = 0  # that run, and loads wait for
        self._patient_bytes = 0  # in flight of them
        self._changed = threading.Condition()
        self._closing = False
        self._threads: list[threading.Thread] = []

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of the I/O that runs."""
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
        """Take a number for `order`, greater than all before: layouts take turns by it."""
        return next(self._tickets)

    def submit(
        self, priority: Priority, num_bytes: int, job: Job, order: tuple[int, ...] = ()
    ) -> None:
        """Queue a job; never blocks. It must not raise: nobody would see it.

        Args:
            priority: class of the job, see the module docstring.
            num_bytes: bytes of I/O that it does; 0 for work that is none.
            job: called in a thread of the pool, with that thread's staging buffer.
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
        """Drop what has not begun, and wait for what has; blocks."""
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
        while (queued := self._next(ended)) is not None:
            try:
                queued.job(staging)
            except Exception:
                # The edge: the thread outlives a faulty job.
                log.exception("io_job_failed", priority=queued.priority.name)
            # A thread that waits keeps no job alive: it may hold a slot, and with it an arena that
            # is abandoned meanwhile.
            ended = queued._replace(job=_done)
            del queued

    def _next(self, ended: _Queued | None) -> _Queued | None:
        """Note the end of a job and wait for the one to run next; None when the pool closes."""
        with self._changed:
            if ended is not None:
                self._count(ended, -1)
            while not self._closing:
                queued = self._first()
                if queued is not None:
                    self._take(queued)
                    self._wake()  # one end may make room for several: each wakes the next
                    return queued
                self._changed.wait()
        return None

    def _first(self) -> _Queued | None:
        """Return the job to start now, if any can start."""
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
        """Wake a thread if there is a job for it: a vain wake-up costs as much as a small I/O."""
        if self._first() is not None:
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
            is_in_the_way = self._num_reads or self._num_ahead >= self._most_ahead
            if is_in_the_way:
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
    """Runs `handle(batch)` in its own thread for batches of at most `max_batch` items.

    `handle` must not raise: nobody would see it. Two batches begin at least `gather_s` apart, so
    that under load many items share one; after a pause an item is handled at once.
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
        """Handle what is queued (or drop it), then end the thread; blocks until it has ended."""
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
