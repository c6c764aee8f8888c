"""Blocks to hash: one thread at a time, some blocks at a time.

One thread hashes faster than disks write. More of them would only take the interpreter from the
event loop, because xxhash keeps it while it hashes a small slice; and for a small block the job
around it costs as much as the hash.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvd.core.records.actions import HashSlot
from kvd.tiers.direct_io import Staging
from kvd.tiers.io_pool import IoPool, Priority

HASH_BATCH = 16  # blocks in one job of the pool


class HashQueue:
    """Has `hash_blocks` called in the pool with what was put, in order.

    Invariant: while something waits, exactly one job is queued or running.
    """

    def __init__(self, pool: IoPool, hash_blocks: Callable[[Sequence[HashSlot]], None]) -> None:
        self._pool = pool
        self._hash_blocks = hash_blocks
        self._waiting: deque[HashSlot] = deque()
        self._is_busy = False
        self._lock = threading.Lock()  # guards both

    def put(self, action: HashSlot) -> None:
        """Queue one; returns at once."""
        with self._lock:
            self._waiting.append(action)
            if self._is_busy:
                return
            self._is_busy = True
        self._pool.submit(Priority.HASH, 0, self._job)

    def _job(self, _staging: Staging) -> None:
        with self._lock:
            num_taken = min(len(self._waiting), HASH_BATCH)
            taken = [self._waiting.popleft() for _ in range(num_taken)]
        self._hash_blocks(taken)
        with self._lock:
            self._is_busy = bool(self._waiting)
            if not self._is_busy:
                return
        self._pool.submit(Priority.HASH, 0, self._job)
