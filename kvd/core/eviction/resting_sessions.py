"""RestingSessions: what a start found of an earlier kvd and nobody has used since, coldest first.

Pure. A start may find a million sessions, most of which are not used for days. They are in order
as they come, so none of them needs a place of its own in an order, or facts: a use that follows
from where it stands says all. A session wakes, and is ranked by itself, as soon as anything
happens to it.

Invariant: a session rests at most once, and never again after it woke.
"""

from collections.abc import Callable, Iterator, Sequence

from kvd.core.eviction.session_order import Warmth
from shared.types.session_key import SessionKey

PAGE = 1024  # places whose sessions are counted together: those that have woken are passed over


class RestingSessions:
    """See the module docstring. `wake` is O(1), finding a place in the order O(log sessions)."""

    def __init__(self) -> None:
        self._first_use = 0
        self._places: list[SessionKey | None] = []  # None: it woke
        self._num_resting: list[int] = []  # by page
        self._uses: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._uses

    def restore(self, keys: Sequence[SessionKey], first_use: int) -> None:
        """Begin with these sessions, coldest first; the use of the first one is `first_use`."""
        assert not self._places, "sessions of an earlier kvd come once"
        self._first_use = first_use
        self._places = list(keys)
        self._uses = {key: use for use, key in enumerate(keys, first_use)}
        counts = range(len(keys), 0, -PAGE)
        self._num_resting = [min(PAGE, count) for count in counts]

    def use(self, key: SessionKey) -> int | None:
        """Number of the session's last use; None: it does not rest."""
        return self._uses.get(key)

    def wake(self, key: SessionKey) -> int | None:
        """Take the session out; returns as `use`."""
        use = self._uses.pop(key, None)
        if use is not None:
            place = use - self._first_use
            self._places[place] = None
            self._num_resting[place // PAGE] -= 1
        return use

    def between(
        self, coldest: Warmth, warmest: Warmth, warmth_of: Callable[[int], Warmth]
    ) -> Iterator[tuple[Warmth, SessionKey]]:
        """Sessions of at least the one warmth and below the other, coldest first.

        Args:
            coldest: what they have at least.
            warmest: what they have not.
            warmth_of: of a session at rest by its last use: the later the warmer.
        """
        start, end = (self._bisect(bound, warmth_of) for bound in (coldest, warmest))
        while start < end:
            page_end = (start // PAGE + 1) * PAGE
            if self._num_resting[start // PAGE]:
                for place in range(start, min(page_end, end)):
                    key = self._places[place]
                    if key is not None:
                        yield warmth_of(self._first_use + place), key
            start = page_end

    def _bisect(self, bound: Warmth, warmth_of: Callable[[int], Warmth]) -> int:
        """The first place that is not colder than the bound."""
        low, high = 0, len(self._places)
        while low < high:
            middle = (low + high) // 2
            if warmth_of(self._first_use + middle) < bound:
                low = middle + 1
            else:
                high = middle
        return low
