"""One thread that takes everything queued at once: the shape of a group commit.

Items are handled in the order they were put. The queue has no bound of its own: what may be put is
bounded by the caller (an SSD write holds a slot, an index row is counted by the manifest).
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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
