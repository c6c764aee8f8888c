"""SessionOrder: the sessions of one tier by how warm they are, coldest first. Pure.

Places are looked up when the order is asked, not when something changes: a session that changes
ten times between two looks is moved once, and a whole queue that is told at once is sorted at once.
If nobody asks for long, some are placed at a time.

Invariant: a session is in the order, with one warmth, or waits to be placed; never neither.
"""

from collections.abc import Callable, Iterator

from sortedcontainers import SortedDict

from shared.types.session_key import SessionKey

Warmth = tuple[float, ...]  # lower is colder; no two sessions of an order have the same
MOST_CHANGED = 512  # sessions whose places are looked up in one call: some ten milliseconds
BULK_SHARE = 8  # with more than one of so many sessions to be moved, sorting all is faster


class SessionOrder:
    """See the module docstring. Changes are O(1); looking is O(log sessions) per change before it.

    Args:
        warmth_of: of a session of the order, now.
    """

    def __init__(self, warmth_of: Callable[[SessionKey], Warmth]) -> None:
        self._warmth_of = warmth_of
        self._placed: SortedDict[Warmth, SessionKey] = SortedDict()
        self._warmths: dict[SessionKey, Warmth | None] = {}  # None: not placed yet
        self._changed: dict[SessionKey, None] = {}

    def __len__(self) -> int:
        return len(self._warmths)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._warmths

    def enter(self, key: SessionKey) -> None:
        """Take the session in, if it is not there yet."""
        if self._warmths.setdefault(key) is None:
            self._changed[key] = None

    def change(self, key: SessionKey) -> None:
        """Note that the session, if it is in the order, may have another warmth."""
        if key in self._warmths:
            self._changed[key] = None

    def leave(self, key: SessionKey) -> None:
        """Take the session out, if it is there."""
        warmth = self._warmths.pop(key, None)
        if warmth is not None:
            del self._placed[warmth]
        self._changed.pop(key, None)

    def warmth(self, key: SessionKey) -> Warmth | None:
        """How warm the session is in this order; None: it is not there."""
        self._settle()
        return self._warmths.get(key)

    def settle_many(self) -> None:
        """Give sessions their places if many have changed; what ranks them is known now."""
        if len(self._changed) >= MOST_CHANGED:
            self._settle()

    def between(self, coldest: Warmth, warmest: Warmth) -> Iterator[SessionKey]:
        """Sessions of at least the one warmth and below the other, coldest first."""
        return (key for _, key in self.ranked_between(coldest, warmest))

    def ranked_between(
        self, coldest: Warmth, warmest: Warmth
    ) -> Iterator[tuple[Warmth, SessionKey]]:
        """The same, each with its warmth."""
        self._settle()
        placed = self._placed
        bounds = placed.irange(coldest, warmest, (True, False))
        return ((warmth, placed[warmth]) for warmth in bounds)

    def downwards(self, coldest: Warmth, warmest: Warmth) -> Iterator[SessionKey]:
        """The same, warmest first."""
        self._settle()
        placed = self._placed
        bounds = placed.irange(coldest, warmest, (True, False), reverse=True)
        return (placed[warmth] for warmth in bounds)

    def _settle(self) -> None:
        """Give every session that changed its place."""
        if len(self._changed) * BULK_SHARE > len(self._warmths):
            keys = {self._warmth_of(key): key for key in self._warmths}
            self._placed = SortedDict(keys)
            self._warmths = {key: warmth for warmth, key in keys.items()}
        else:
            for key in self._changed:
                warmth = self._warmths[key]
                if warmth is not None:
                    del self._placed[warmth]
            for key in self._changed:
                warmth = self._warmths[key] = self._warmth_of(key)
                self._placed[warmth] = key
        self._changed.clear()
