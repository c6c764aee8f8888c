"""Which waiting sessions may still have something to be read into DRAM, soonest needed first.

Pure; knows no bytes: who reads says so with `settle` and `reopen`. A look costs O(log sessions) for
each change before it.

*Source:* look-ahead prefetching, CachedAttention §3.3.1.
"""

from collections.abc import Callable
from itertools import islice

from sortedcontainers import SortedList

from kvd.core.eviction.queue_window import QueuePlace, QueueWindow
from shared.types.session_key import SessionKey

MOST_LATE = 16  # sessions passed over because they cannot be read in time, per look
BULK_SHARE = 8  # with more than one of so many sessions to be moved, sorting all is faster


class PrefetchOrder:
    """See the module docstring.

    Places are looked up when the order is asked, not when something changes: a whole queue that is
    told at once is sorted at once.
    """

    def __init__(self, queue: QueueWindow) -> None:
        self._queue = queue
        self._open: SortedList[QueuePlace] = SortedList()
        self._places: dict[SessionKey, QueuePlace] = {}
        self._reopened: dict[SessionKey, None] = {}  # their places are to be looked up

    def __len__(self) -> int:
        """Sessions that may have something to be read."""
        self._look_up()
        return len(self._open)

    def reopen(self, key: SessionKey) -> None:
        """Look at a session again: its place is another, or bytes of it left DRAM or came to SSD.

        One with no waiting turn is not looked at; it is to be settled when that is so. O(1).
        """
        self._reopened[key] = None

    def settle(self, key: SessionKey) -> None:
        """There is nothing more to be read of a session now."""
        self._reopened.pop(key, None)
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
        self._look_up()
        first = None
        for place in islice(self._open, MOST_LATE):
            if self._queue.num_ahead(place) >= window:
                break
            if is_in_time(place.key, self._queue.starts_in_ns(place)):
                return place.key
            first = first or place.key
        return first

    def _look_up(self) -> None:
        """Give every session that was reopened its place, if a turn of it waits."""
        reopened = self._reopened
        if not reopened:
            return
        found = {key: self._queue.place(key) for key in reopened}
        places = {key: place for key, place in found.items() if place is not None}
        if len(reopened) * BULK_SHARE > len(self._places):
            kept = {key: place for key, place in self._places.items() if key not in reopened}
            self._places = kept | places
            self._open = SortedList(self._places.values())
        else:
            for key in reopened:
                old = self._places.pop(key, None)
                if old is not None:
                    self._open.remove(old)
            self._places |= places
            self._open.update(places.values())
        reopened.clear()
