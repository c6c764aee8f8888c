"""Something that moves one session's bytes after another: an SSD that reads, a network. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.types.units import NS_PER_S


class Transfer(NamedTuple):
    """One session's bytes on their way, or waiting for it.

    Attributes:
        session: number of the session.
        number: tells it from the session's other transfers.
        ends_ns: when it is over if it is moved in its turn.
    """

    session: int
    num_bytes: int
    number: int = 0
    ends_ns: int = 0


@dataclass(slots=True)
class Channel:
    """One transfer at a time, in the order in which they were asked for; none is broken off.

    Attributes:
        bytes_moved: bytes of all transfers that have begun.
    """

    bytes_per_s: float
    bytes_moved: int = 0
    _current: Transfer | None = None
    _waiting: deque[Transfer] = field(default_factory=deque)
    _ends_ns: int = 0  # of all that was asked for
    _num_transfers: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is moved."""
        return self._current is None

    def duration_ns(self, num_bytes: int) -> int:
        """Return how long so many bytes take."""
        return round(num_bytes / self.bytes_per_s * NS_PER_S)

    def waits_ns(self, now_ns: int) -> int:
        """Return how long a transfer that is asked for now waits for its begin."""
        return 0 if self._current is None else self._ends_ns - now_ns

    def remaining_ns(self, now_ns: int) -> int:
        """Return how long what is moved now still takes."""
        return self._current.ends_ns - now_ns if self._current else 0

    def move(self, session: int, num_bytes: int, now_ns: int) -> Transfer:
        """Move a session's bytes, at once or after what was asked for before."""
        self._num_transfers += 1
        self._ends_ns = now_ns + self.waits_ns(now_ns) + self.duration_ns(num_bytes)
        transfer = Transfer(session, num_bytes, self._num_transfers, self._ends_ns)
        if self._current is None:
            self._begin(transfer)
        else:
            self._waiting.append(transfer)
        return transfer

    def next_ns(self) -> int | None:
        """Return when a transfer ends next; None: nothing is moved."""
        return None if self._current is None else self._current.ends_ns

    def end(self, now_ns: int) -> Transfer | None:
        """Take the transfer that ends now, and begin the next; None: none ends."""
        ended = self._current
        if ended is None or ended.ends_ns > now_ns:
            return None
        self._current = None
        if self._waiting:
            self._begin(self._waiting.popleft())
        return ended

    def _begin(self, transfer: Transfer) -> None:
        self._current = transfer
        self.bytes_moved += transfer.num_bytes
