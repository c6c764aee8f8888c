"""Turns at a server: each turn that waits or runs, and the rate of starts and ends. Pure."""

from dataclasses import dataclass

from kvd.plan.outcome import TurnRecord
from kvd.plan.trace import Turn
from shared.types.load_choice import RecentStarts
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S

Returns = dict[SessionKey, int]  # by session: when its KV is needed next, in ns
NEWEST_SHARE = 1 / 16  # weight of the newest value in a running mean


def plan_key(session: int) -> SessionKey:
    """Return the key of a session, which in plans is a number."""
    return SessionKey("plan", "plan", str(session))


@dataclass(slots=True)
class Request:
    """A turn that waits or runs.

    Attributes:
        session, key: its session.
        number: its place in the order of arrivals.
        turn: the turn.
        record: its measurements.
        hbm_bytes: the HBM it needs while it runs.
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
        interval_ns: time between two starts of turns; 0: fewer than two have started.
        starts: the last turns that started.
        turn_s: time for which a turn has its slot; 0: none has ended yet.
    """

    def __init__(self) -> None:
        self.interval_ns = 0.0
        self.turn_s = 0.0
        self._started_ns: int | None = None  # the last turn
        self.starts = RecentStarts()

    def on_start(self, now_ns: int) -> None:
        """Record that a turn got a slot."""
        if self._started_ns is not None:
            self.interval_ns = _mean(self.interval_ns, now_ns - self._started_ns)
        self._started_ns = now_ns
        self.starts.record(now_ns)

    def on_end(self, started_ns: int, now_ns: int) -> None:
        """Record that a turn freed its slot."""
        self.turn_s = _mean(self.turn_s, (now_ns - started_ns) / NS_PER_S)


def _mean(mean: float, newest: float) -> float:
    """Return the running mean with one more value; the first value is the mean."""
    return mean + (NEWEST_SHARE if mean else 1.0) * (newest - mean)
