"""The SSD's read channel: one read at a time, demand before prefetch. Pure.

A read that began is not broken off. Demands are read in the order in which they came; a prefetch
begins only while nothing else is to be read, so that it is chosen as late as can be.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.types.units import NS_PER_S


class Read(NamedTuple):
    """One session's read.

    Attributes:
        number: tells it from the session's other reads.
    """

    session: int
    num_bytes: int
    number: int = 0


@dataclass(slots=True)
class SsdChannel:
    """See the module docstring. Sessions are numbers.

    Attributes:
        bytes_read: of reads that have begun.
    """

    bytes_per_s: float
    bytes_read: int = 0
    _current: Read | None = None
    _ends_ns: int = 0
    _demands: deque[Read] = field(default_factory=deque)
    _demand_bytes: int = 0
    _num_reads: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether a prefetch may begin."""
        return self._current is None

    def duration_ns(self, num_bytes: int) -> int:
        """How long a read takes."""
        return round(num_bytes / self.bytes_per_s * NS_PER_S)

    def waits_ns(self, now_ns: int) -> int:
        """How long a demand made now waits for its read to begin."""
        if self._current is None:
            return 0
        return self.remaining_ns(now_ns) + self.duration_ns(self._demand_bytes)

    def remaining_ns(self, now_ns: int) -> int:
        """How long what is read now still takes."""
        return self._ends_ns - now_ns if self._current else 0

    def read(self, session: int, num_bytes: int, now_ns: int) -> Read:
        """Read, at once or after the demands before it; a prefetch asks for an idle channel."""
        self._num_reads += 1
        read = Read(session, num_bytes, self._num_reads)
        if self._current is None:
            self._begin(read, now_ns)
        else:
            self._demands.append(read)
            self._demand_bytes += num_bytes
        return read

    def next_ns(self) -> int | None:
        """When a read ends next; None: nothing is read."""
        return None if self._current is None else self._ends_ns

    def end(self, now_ns: int) -> Read | None:
        """Take the read that ends now, and begin the next demand; None: none ends."""
        ended = self._current
        if ended is None or self._ends_ns > now_ns:
            return None
        self._current = None
        if self._demands:
            read = self._demands.popleft()
            self._demand_bytes -= read.num_bytes
            self._begin(read, now_ns)
        return ended

    def _begin(self, read: Read, now_ns: int) -> None:
        self._current = read
        self.bytes_read += read.num_bytes
        self._ends_ns = now_ns + self.duration_ns(read.num_bytes)
