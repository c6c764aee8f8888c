"""The engine's time: prefills that block, and decodes that share one clock. Pure.

One prefill runs at a time, and stalls all decodes. Decodes run in steps of a fixed length, however
many they are. A decode clock that stands still during prefills therefore tells when each decode
ends: a turn costs O(log turns), not O(steps).

Invariants: 1. decodes end in the order of their ends on the decode clock; 2. the decode clock and
the prefills never advance together.

*Source:* blocking prefill under continuous batching, CachedAttention §2.1.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple


class Prefill(NamedTuple):
    """A turn that has a slot and its KV, and waits for its prefill or is being prefilled."""

    session: int
    prefill_ns: int
    decode_ns: int


@dataclass(slots=True)
class Gpu:
    """The engine's prefills and decodes. Sessions are numbers; each has at most one turn here.

    Attributes:
        busy_ns: time in which a prefill or a decode ran.
        prefill_ns: time in which a prefill ran.
    """

    busy_ns: int = 0
    prefill_ns: int = 0
    _now_ns: int = 0
    _decode_clock_ns: int = 0
    _prefills: deque[Prefill] = field(default_factory=deque)  # the first one runs
    _prefill_ends_ns: int = 0
    _decodes: list[tuple[int, int]] = field(default_factory=list)  # heap: end on its clock, session

    def add(self, prefill: Prefill, now_ns: int) -> None:
        """Queue a turn's prefill."""
        self.advance(now_ns)
        self._prefills.append(prefill)
        if len(self._prefills) == 1:
            self._prefill_ends_ns = now_ns + prefill.prefill_ns

    @property
    def num_turns(self) -> int:
        """Turns that prefill or decode, or wait for that."""
        return len(self._prefills) + len(self._decodes)

    def backlog_ns(self, now_ns: int) -> int:
        """Return how long a prefill that is queued now would wait for those before it."""
        if not self._prefills:
            return 0
        queued_ns = sum(prefill.prefill_ns for prefill in islice(self._prefills, 1, None))
        return self._prefill_ends_ns - now_ns + queued_ns

    def next_ns(self) -> int | None:
        """Return when a prefill or a decode ends next; None: nothing is under way."""
        if self._prefills:
            return self._prefill_ends_ns
        if self._decodes:
            return self._now_ns + self._decodes[0][0] - self._decode_clock_ns
        return None

    def end_prefill(self, now_ns: int) -> int | None:
        """End the prefill that is due now, and begin the decode; return its session, or None."""
        self.advance(now_ns)
        if not self._prefills or self._prefill_ends_ns > now_ns:
            return None
        ended = self._prefills.popleft()
        heappush(self._decodes, (self._decode_clock_ns + ended.decode_ns, ended.session))
        if self._prefills:
            self._prefill_ends_ns = now_ns + self._prefills[0].prefill_ns
        return ended.session

    def end_decode(self, now_ns: int) -> int | None:
        """End the decode that is due now; return its session, or None."""
        self.advance(now_ns)
        if self._prefills or not self._decodes or self._decodes[0][0] > self._decode_clock_ns:
            return None
        return heappop(self._decodes)[1]

    def advance(self, now_ns: int) -> None:
        """Advance to `now_ns`, and count the time."""
        passed_ns = now_ns - self._now_ns
        self._now_ns = now_ns
        if self._prefills:
            self.prefill_ns += passed_ns
            self.busy_ns += passed_ns
        elif self._decodes:
            self._decode_clock_ns += passed_ns
            self.busy_ns += passed_ns
