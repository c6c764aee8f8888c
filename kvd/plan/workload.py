"""The sessions to plan for, and how fast they arrive. Pure but for reading files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvd.plan.formats.filling import Filling
from kvd.plan.formats.recognition import RECOGNISED, read_sessions
from kvd.plan.positions import coupled
from kvd.plan.trace import Session, footprint_tokens
from shared.types.errors import InvalidInputError

DEFAULT_FILLING = Filling()


class NoRateError(InvalidInputError):
    """Sessions that all begin at once have no rate that could be changed."""

    reason = "no_rate"


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in the order in which they begin, and where they come from.

    Attributes:
        origin: for people: the file, or what was drawn.
    """

    origin: str
    sessions: Sequence[Session]

    @property
    def num_turns(self) -> int:
        """Of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def footprint_tokens(self) -> int:
        """See trace.footprint_tokens."""
        return footprint_tokens(self.sessions)

    @property
    def longest_tokens(self) -> int:
        """The largest context."""
        return max(turn.kept_tokens for session in self.sessions for turn in session.turns)

    @property
    def span_s(self) -> float:
        """From the first session's begin to the last one's."""
        return self.sessions[-1].start_s - self.sessions[0].start_s

    def with_arrival_rate(self, rate: float) -> "Workload":
        """The same sessions, of which so many begin a second, in the mean.

        Raises:
            NoRateError: they all begin at once.
        """
        self.check_rate("--arrival-rate")
        factor = (len(self.sessions) - 1) / self.span_s / rate
        stretched = [replace(each, start_s=each.start_s * factor) for each in self.sessions]
        return replace(self, sessions=stretched)

    def with_coupled_positions(self) -> "Workload":
        """The same sessions, if what is stored is useless after a context overflow."""
        return Workload(f"{self.origin}, coupled positions", [coupled(s) for s in self.sessions])

    def check_rate(self, option: str) -> None:
        """Raise NoRateError if they all begin at once: then this option makes no sense."""
        if self.span_s <= 0:
            raise NoRateError(
                "all sessions of the trace begin at the same time",
                f"give the times at which they begin, or leave {option} out",
            )


def read_workload(
    path: Path, format_name: str = RECOGNISED, filling: Filling = DEFAULT_FILLING
) -> Workload:
    """Read a trace of any kind.

    Args:
        path: of the file.
        format_name: of FORMATS.
        filling: how what the trace lacks is drawn.

    Raises:
        BadTraceError: it is none.
    """
    sessions, how = read_sessions(path, format_name, filling)
    return Workload(f"{path.name}, {how}" if how else path.name, sessions)
