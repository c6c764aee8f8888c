"""The sessions to plan for, read from a trace of any format, and their arrival rate.

Pure, except that it reads files. A file's first line tells its format. The effect of a context
overflow on stored KV depends on the positions that are stored with the keys:

decoupled   none: keys are stored without positions, and what a truncation keeps stays valid
coupled     stored KV is useless after a truncation: the truncated turn recomputes what is left of
            its history (the paper's OF, section 4.3.4)

States are always coupled. If a history is shorter though the window had room for it, the
conversation was continued from an earlier message: KV stored before that message stays valid.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvd.plan.formats.filling import Filling
from kvd.plan.formats.mooncake import read_mooncake
from kvd.plan.formats.request_tables import AZURE, BURSTGPT, header_of, read_azure, read_burstgpt
from kvd.plan.formats.sharegpt import read_sharegpt
from kvd.plan.hardware import keep_to_window
from kvd.plan.trace import Session, Turn, first_line, footprint_tokens, read_trace
from shared.types.errors import InvalidInputError

RECOGNISED = "auto"
TURNS = "turns"  # the format of trace.py

Reader = Callable[[Path, Filling], tuple[list[Session], str]]

READERS: Mapping[str, Reader] = {
    TURNS: lambda path, _: (read_trace(path), ""),
    "mooncake": lambda path, _: read_mooncake(path),
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "sharegpt": read_sharegpt,
}
FORMATS = (RECOGNISED, *READERS)


def recognised(path: Path) -> str:
    """Return the format of a trace, by its first line; TURNS if it is no other.

    Raises:
        BadTraceError: the file cannot be read.
    """
    line = first_line(path).lstrip("\ufeff \t")
    if line.startswith("["):
        return "sharegpt"
    if not line.startswith("{"):
        names = set(header_of(line))
        for name, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
            if names.intersection(columns[1:]):
                return name
        return TURNS
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):  # reading it as TURNS reports the error
        return TURNS
    if {"input_length", "hash_ids"} <= fields.keys():
        return "mooncake"
    return "sharegpt" if "conversations" in fields else TURNS


def read_sessions(path: Path, format_name: str, filling: Filling) -> tuple[list[Session], str]:
    """Return the sessions of a file, and how data it lacks was filled; "": it lacks none.

    Raises:
        BadTraceError: the file is no trace of that format.
        KeyError: there is no such format.
    """
    name = recognised(path) if format_name == RECOGNISED else format_name
    return READERS[name](path, filling)


def coupled(session: Session, *, is_for_good: bool = False, window_tokens: int = 0) -> Session:
    """Return a session as if positions were stored: a truncated history counts as new tokens.

    Args:
        session: a session whose history shrinks where its context was truncated.
        is_for_good: the session never hits again after its first truncation.
        window_tokens: a history that shrank though this window had room for it was not truncated;
            0: every history that shrank was.
    """
    turns: list[Turn] = []
    kept_tokens, is_lost = 0, False
    for turn in session.turns:
        has_shrunk = turn.history_tokens < kept_tokens
        is_truncated = has_shrunk and kept_tokens + turn.new_tokens > window_tokens
        is_lost = is_truncated or (is_lost and is_for_good)
        turns.append(_recomputed(turn) if is_lost else turn)
        kept_tokens = turn.kept_tokens
    return replace(session, turns=tuple(turns))


def _recomputed(turn: Turn) -> Turn:
    return replace(turn, new_tokens=turn.history_tokens + turn.new_tokens, history_tokens=0)


DEFAULT_FILLING = Filling()


class NoRateError(InvalidInputError):
    """All sessions begin at the same time, so there is no rate to change."""

    reason = "no_rate"


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in the order in which they begin.

    Attributes:
        origin: their origin for people: the file, or how they were drawn.
        sessions: the sessions.
        share: the share of all sessions that these are, if only some servers are replayed.
    """

    origin: str
    sessions: Sequence[Session]
    share: float = 1.0

    @property
    def num_turns(self) -> int:
        """Turns of all sessions."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def num_tool_turns(self) -> int:
        """Turns whose answer calls tools."""
        return sum(bool(turn.tools) for session in self.sessions for turn in session.turns)

    @property
    def footprint_tokens(self) -> int:
        """Tokens of all sessions at their largest."""
        return footprint_tokens(self.sessions)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the largest context."""
        return max(turn.kept_tokens for session in self.sessions for turn in session.turns)

    @property
    def span_s(self) -> float:
        """Seconds from the first session's begin to the last one's."""
        return self.sessions[-1].start_s - self.sessions[0].start_s

    def with_arrival_rate(self, rate: float) -> "Workload":
        """Return the same sessions, with begins scaled to a mean rate per second.

        Raises:
            NoRateError: all sessions begin at once.
        """
        self.check_rate("--arrival-rate")
        factor = (len(self.sessions) - 1) / self.span_s / rate
        stretched = [replace(each, start_s=each.start_s * factor) for each in self.sessions]
        return replace(self, sessions=stretched)

    def with_coupled_positions(self) -> "Workload":
        """Return the sessions as if stored KV were useless after a context overflow."""
        sessions = [coupled(session) for session in self.sessions]
        return replace(self, origin=f"{self.origin}, coupled positions", sessions=sessions)

    def with_states(self, window_tokens: int) -> "Workload":
        """Return the sessions for a model with states and such a window."""
        if not keep_to_window(self.sessions, window_tokens):
            return self  # the trace is not truncated to this window
        sessions = [coupled(each, window_tokens=window_tokens) for each in self.sessions]
        return replace(self, sessions=sessions)

    def check_rate(self, option: str) -> None:
        """Raise NoRateError if all sessions begin at once: `option` makes no sense then."""
        if self.span_s <= 0:
            raise NoRateError(
                "all sessions of the trace begin at the same time",
                f"give the sessions different start times, or leave {option} out",
            )


def read_workload(
    path: Path, format_name: str = RECOGNISED, filling: Filling = DEFAULT_FILLING
) -> Workload:
    """Read a trace of any format.

    Args:
        path: the file.
        format_name: a key of FORMATS.
        filling: distributions for data that the trace lacks.

    Raises:
        BadTraceError: the file is no trace.
    """
    sessions, how = read_sessions(path, format_name, filling)
    return Workload(f"{path.name}, {how}" if how else path.name, sessions)
