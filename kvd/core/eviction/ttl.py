"""Deadlines of sessions, in order, with updates that mostly cost nothing.

Pure. A use of a session moves its deadline on without touching the order: the entry that comes due
too early is put back then. A session that is gone leaves at once.

Invariant: a session has one entry at most, so that the order is as long as what lives.
"""

from sortedcontainers import SortedList

from shared.types.session_key import SessionKey


class TtlClock:
    """Which session's deadline comes next. It may say so too early, never too late.

    Calls are O(log sessions); `schedule` is O(1) where the session has an earlier entry already.
    """

    def __init__(self) -> None:
        self._order: SortedList[tuple[int, SessionKey]] = SortedList()
        self._earliest: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._earliest)

    def schedule(self, key: SessionKey, deadline_ns: int | None) -> None:
        """Make sure the session is looked at by `deadline_ns`; None never needs a look."""
        if deadline_ns is None:
            return
        earliest = self._earliest.get(key)
        if earliest is None or deadline_ns < earliest:
            self.forget(key)
            self._earliest[key] = deadline_ns
            self._order.add((deadline_ns, key))

    def forget(self, key: SessionKey) -> None:
        """Take a session out, if it is there: it is gone."""
        deadline_ns = self._earliest.pop(key, None)
        if deadline_ns is not None:
            self._order.remove((deadline_ns, key))

    def restore(self, entries: list[tuple[int, SessionKey]]) -> None:
        """Start with these deadlines, one a session: O(sessions) if they come in order."""
        assert not self._earliest, "a clock is restored before it is used"
        self._order = SortedList(entries)
        self._earliest = {key: deadline_ns for deadline_ns, key in entries}

    def next_deadline_ns(self) -> int | None:
        """Return when to look next."""
        return self._order[0][0] if self._order else None

    def pop_due(self, now_ns: int) -> SessionKey | None:
        """Take the next session whose entry is due; the caller drops it or schedules it again."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or deadline_ns > now_ns:
            return None
        key = self._order.pop(0)[1]
        del self._earliest[key]
        return key
