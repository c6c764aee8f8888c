"""Deadlines of sessions, in order, with updates that mostly cost nothing.

Pure. A use of a session postpones its deadline without touching the order: the entry then comes due
too early, and the caller schedules it again. A session that is gone is removed at once.

Invariant: a session has at most one entry, so the order is as long as there are live sessions.
"""

from sortedcontainers import SortedList

from shared.types.session_key import SessionKey


class TtlClock:
    """Tells which session's deadline comes next. It may report one too early, never too late.

    Calls are O(log sessions). `schedule` is O(1) if the session has an earlier entry already.
    """

    def __init__(self) -> None:
        self._order: SortedList[tuple[int, SessionKey]] = SortedList()
        self._earliest: dict[SessionKey, int] = {}

    def __len__(self) -> int:
        return len(self._earliest)

    def schedule(self, key: SessionKey, deadline_ns: int | None) -> None:
        """Make sure that the session comes due at `deadline_ns` or earlier; None: no deadline."""
        if deadline_ns is None:
            return
        earliest = self._earliest.get(key)
        if earliest is None or deadline_ns < earliest:
            self.forget(key)
            self._earliest[key] = deadline_ns
            self._order.add((deadline_ns, key))

    def forget(self, key: SessionKey) -> None:
        """Remove a session, if it has an entry."""
        deadline_ns = self._earliest.pop(key, None)
        if deadline_ns is not None:
            self._order.remove((deadline_ns, key))

    def restore(self, entries: list[tuple[int, SessionKey]]) -> None:
        """Start with these deadlines, one per session: O(sessions) if they are in order."""
        assert not self._earliest, "a clock is restored before it is used"
        self._order = SortedList(entries)
        self._earliest = {key: deadline_ns for deadline_ns, key in entries}

    def next_deadline_ns(self) -> int | None:
        """Return when the next entry comes due; None if there is none."""
        return self._order[0][0] if self._order else None

    def pop_due(self, now_ns: int) -> SessionKey | None:
        """Remove the next due entry; return its session, None if none is due.

        The caller then drops the session or schedules it again.
        """
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or deadline_ns > now_ns:
            return None
        key = self._order.pop(0)[1]
        del self._earliest[key]
        return key
