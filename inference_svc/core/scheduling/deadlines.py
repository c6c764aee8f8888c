"""Requests by deadline. An ended request is forgotten when its turn comes, or when many have ended.

Invariant: a request that has not ended and has a deadline is in the heap.
"""

from heapq import heapify, heappop, heappush

from inference_svc.core.scheduling.request import Request

_SPARE = 64  # entries of ended requests that are never worth a clean-up


class Deadlines:
    """See the module docstring."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []  # deadline_ns, number
        self._clean_up_at = _SPARE

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline. O(log n)."""
        if request.deadline_ns is None:
            return
        heappush(self._heap, (request.deadline_ns, request.number, request))
        if len(self._heap) > self._clean_up_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_over]
            heapify(self._heap)
            self._clean_up_at = 2 * len(self._heap) + _SPARE

    def next_ns(self) -> int | None:
        """The earliest deadline of a request that has not ended."""
        while self._heap and self._heap[0][2].is_over:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_ns: int) -> list[Request]:
        """Take out the requests whose deadline is not later than now and that have not ended."""
        due = []
        while (deadline_ns := self.next_ns()) is not None and deadline_ns <= now_ns:
            request = heappop(self._heap)[2]
            if request.deadline_ns is not None and request.deadline_ns <= now_ns:
                due.append(request)
            else:  # it was given more time: a repeat of its turn asked for it
                self.add(request)
        return due
