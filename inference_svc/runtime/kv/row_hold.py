"""RowHold: whether lent rows may be reused: not while their owner or a copy still needs them.

Owns a counter; knows no memory.

Invariants: 1. `give_back` is called exactly once, by whoever lets go last: the owner or a holder;
2. nobody takes hold of rows that were released, even while others still hold them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _leave_to_garbage_collection() -> None:
    """Memory of its own goes with the last tensor that views it."""


class RowHold:
    """See the module docstring; every method may be called from any thread."""

    def __init__(self, give_back: Callable[[], None] = _leave_to_garbage_collection) -> None:
        """Store what to call once nobody needs the rows."""
        self._give_back = give_back
        self._lock = threading.Lock()
        self._num_holders = 0
        self._is_released = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the rows inside the block; it may be left in another thread.

        Raises:
            AssertionError: if they were released before.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("released rows are taken hold of")
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                is_last = self._is_released and self._num_holders == 0
            if is_last:
                self._give_back()

    def release(self) -> None:
        """Let the owner's part go: the rows are given back now or by the last holder.

        Raises:
            AssertionError: the second time.
        """
        with self._lock:
            if self._is_released:
                raise AssertionError("rows are released twice")
            self._is_released = True
            is_last = self._num_holders == 0
        if is_last:
            self._give_back()
