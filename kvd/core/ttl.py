"""Deadlines of sessions: a heap with lazy updates.

Pure. A use of a session moves its deadline on without touching the heap: the entry that comes due
too early is put back then. So a use costs nothing, and each session has one entry in the usual
case.
"""

from heapq import heapify, heappop, heappush

from shared.session_key import SessionKey


class TtlClock:
    """Which session's deadline comes next. It may say so too early, never too late."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, SessionKey]] = []
        self._earliest: dict[SessionKey, int] = {}  # the entry that counts; others are skipped

    def schedule(self, key: SessionKey, deadline_ns: int | None) -> None:
        """Make sure the session is looked at by `deadline_ns`; None never needs a look."""
        if deadline_ns is None:
            return
        earliest = self._earliest.get(key)
        if earliest is None or deadline_ns < earliest:
            self._earliest[key] = deadline_ns
            heappush(self._heap, (deadline_ns, key))

    def restore(self, entries: list[tuple[int, SessionKey]]) -> None:
        """Start with these deadlines, one a session: O(sessions)."""
        assert not self._heap, "a clock is restored before it is used"
        self._heap = entries
        heapify(self._heap)
        self._earliest = {key: deadline_ns for deadline_ns, key in entries}

    def next_deadline_ns(self) -> int | None:
        """When to look next."""
        while self._heap and self._earliest.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> SessionKey | None:
        """Take the next session whose entry is due; the caller drops it or schedules it again."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or deadline_ns > now_ns:
            return None
        key = heappop(self._heap)[1]
        del self._earliest[key]
        return key
