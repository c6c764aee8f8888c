"""Which waiting sessions may still have something to be read into DRAM, soonest needed first.

Pure; knows no bytes: who reads says so with `settle` and `reopen`. Every call is O(log sessions).

*Source:* look-ahead prefetching, CachedAttention §3.3.1.
"""

from collections.abc import Callable
from itertools import islice

from sortedcontainers import SortedList

from kvd.core.queue_window import QueuePlace, QueueWindow
from shared.session_key import SessionKey

MOST_LATE = 16  # sessions passed over because they cannot be read in time, per look


class PrefetchOrder:
    """See the module docstring."""

    def __init__(self, queue: QueueWindow) -> None:
        self._queue = queue
        self._open: SortedList[QueuePlace] = SortedList()
        self._places: dict[SessionKey, QueuePlace] = {}

    def reopen(self, key: SessionKey) -> None:
        """Look at a session again: its place is another, or bytes of it left DRAM or came to SSD.

        One with no waiting turn is not looked at.
        """
        self.settle(key)
        place = self._queue.place(key)
        if place is not None:
            self._places[key] = place
            self._open.add(place)

    def settle(self, key: SessionKey) -> None:
        """There is nothing more to be read of a session now."""
        place = self._places.pop(key, None)
        if place is not None:
            self._open.remove(place)

    def pick(self, window: int, is_in_time: Callable[[SessionKey, int], bool]) -> SessionKey | None:
        """The session to be read next, if there is one.

        Args:
            window: jobs of the queue that are looked at (the paper's L_pw).
            is_in_time: whether a session can be read within so many nanoseconds, 0: not known when.
                One that cannot yields to a later one that can; if none can, the first is read
                all the same: what is there by then need not be read on demand.
        """
        first = None
        for place in islice(self._open, MOST_LATE):
            if self._queue.num_ahead(place) >= window:
                break
            if is_in_time(place.key, self._queue.starts_in_ns(place)):
                return place.key
            first = first or place.key
        return first
