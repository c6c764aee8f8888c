"""Turns at a server: each that waits or runs, and how fast they come and go. Pure."""

from dataclasses import dataclass

from kvd.plan.outcome import TurnRecord
from kvd.plan.trace import Turn
from shared.types.load_choice import RecentStarts
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

Returns = dict[SessionKey, int]  # when what is kept of a session is wanted next, in ns
NEWEST_SHARE = 1 / 16  # of the newest value in a running mean


def plan_key(session: int) -> SessionKey:
    """Return the key of a session, which is a number in plans."""
    return SessionKey("plan", "plan", str(session))


@dataclass(slots=True)
class Request:
    """A turn that waits or runs.

    Attributes:
        number: turns are counted in the order in which they arrive.
    """

    session: int
    key: SessionKey
    number: int
    turn: Turn
    record: TurnRecord
    hbm_bytes: int


class Pace:
    """Running means of a server's turns, as engines measure them.

    Attributes:
        interval_ns: between two starts of turns; 0: two have not started yet.
        starts: the last turns that started.
        turn_s: for which a turn has its slot; 0: none has ended yet.
    """

    def __init__(self) -> None:
        self.interval_ns = 0.0
        self.turn_s = 0.0
        self._started_ns: int | None = None  # the last turn
        self.starts = RecentStarts()

    def started(self, now_ns: int) -> None:
        """Note that a turn got its slot."""
        if self._started_ns is not None:
            self.interval_ns = _mean(self.interval_ns, now_ns - self._started_ns)
        self._started_ns = now_ns
        self.starts.record(now_ns)

    def ended(self, started_ns: int, now_ns: int) -> None:
        """Note that a turn gave its slot back."""
        self.turn_s = _mean(self.turn_s, (now_ns - started_ns) / NS_PER_S)


def _mean(mean: float, newest: float) -> float:
    """Return the mean with one value more; the first one is the mean."""
    return mean + (NEWEST_SHARE if mean else 1.0) * (newest - mean)
