"""A channel that moves the bytes of one session after another: an SSD's reads, a network. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.types.units import NS_PER_S


class Transfer(NamedTuple):
    """A transfer of a session's bytes, under way or waiting.

    Attributes:
        session: number of the session.
        num_bytes: its bytes.
        number: distinguishes the session's transfers.
        ends_ns: when it ends, behind those before it.
    """

    session: int
    num_bytes: int
    number: int = 0
    ends_ns: int = 0


@dataclass(slots=True)
class Channel:
    """Does one transfer at a time, in the order of requests; none is cancelled.

    Attributes:
        bytes_per_s: the bandwidth.
        bytes_moved: bytes of all transfers that have begun.
    """

    bytes_per_s: float
    bytes_moved: int = 0
    _current: Transfer | None = None
    _waiting: deque[Transfer] = field(default_factory=deque)
    _ends_ns: int = 0  # of the last transfer in the queue
    _num_transfers: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being moved."""
        return self._current is None

    def duration_ns(self, num_bytes: int) -> int:
        """Return how long moving so many bytes takes."""
        return round(num_bytes / self.bytes_per_s * NS_PER_S)

    def waits_ns(self, now_ns: int) -> int:
        """Return how long a transfer that is requested now waits until it begins."""
        return 0 if self._current is None else self._ends_ns - now_ns

    def remaining_ns(self, now_ns: int) -> int:
        """Return how long the transfer that is under way still takes."""
        return self._current.ends_ns - now_ns if self._current else 0

    def move(self, session: int, num_bytes: int, now_ns: int) -> Transfer:
        """Queue a transfer of a session's bytes."""
        self._num_transfers += 1
        self._ends_ns = now_ns + self.waits_ns(now_ns) + self.duration_ns(num_bytes)
        transfer = Transfer(session, num_bytes, self._num_transfers, self._ends_ns)
        if self._current is None:
            self._begin(transfer)
        else:
            self._waiting.append(transfer)
        return transfer

    def next_ns(self) -> int | None:
        """Return when the transfer under way ends; None: there is none."""
        return None if self._current is None else self._current.ends_ns

    def end(self, now_ns: int) -> Transfer | None:
        """End the transfer that is due now, and begin the next; return it, or None."""
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
