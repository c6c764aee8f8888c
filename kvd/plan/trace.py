"""The sessions of a trace. Pure, except that it reads the file.

A trace is newline JSON, plain or gzip, one object per turn, sorted by `t` (arrival, seconds):
`session`, `turn` (1, 2, …), `new_tokens`, `output_tokens`, `history_tokens` (at most what the
session has kept after an earlier turn), `think_s` (from the end of the previous answer to this
turn). Only the arrival of a first turn is used: the replay is closed-loop. Two fields are optional,
and other keys are ignored:

tools       names of the tools that the turn's answer calls; `think_s` of the next turn is then the
            time that they take
supersedes  in a first turn: the earlier session that this one continues (a conversation that was
            compacted, or continued from an earlier message). It comes `think_s` after that
            session's last answer
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from sys import intern
from typing import IO, Any

from xxhash import xxh3_64_intdigest

from shared.types.errors import InvalidInputError

MAX_TOKENS = 1 << 30  # in one field: far above any model's context
MAX_SECONDS = 1e11  # allows Unix times
MAX_TOOLS = 1024  # calls in one answer
MAX_HEAD = 1 << 20  # bytes read of a first line, which may be gigabytes long
_GZIP = b"\x1f\x8b"
_REMEDY = (
    "give newline JSON, plain or gzip, each line a turn with t, session, turn, new_tokens, "
    "output_tokens, history_tokens, think_s"
)


class BadTraceError(InvalidInputError):
    """The file is no trace."""

    reason = "bad_trace"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; its prompt is the history and the new tokens.

    Attributes:
        new_tokens: tokens of the prompt that are new.
        output_tokens: tokens of the answer.
        history_tokens: tokens of the prompt that earlier turns have left.
        think_s: seconds from the end of the previous answer to this turn.
        tools: names of the tools that the answer calls; the next turn brings their results.
    """

    new_tokens: int
    output_tokens: int
    history_tokens: int
    think_s: float
    tools: tuple[str, ...] = ()

    @property
    def kept_tokens(self) -> int:
        """Tokens to store after the turn."""
        return self.history_tokens + self.new_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Session:
    """One session.

    Attributes:
        start_s: when it begins, in seconds.
        turns: its turns.
        supersedes: the number of an earlier session that it continues. It then begins its first
            turn's `think_s` after that session's last answer. None: it begins at `start_s`.
    """

    start_s: float
    turns: tuple[Turn, ...]
    supersedes: int | None = None


def truncated(context: int, new: int, window_tokens: int) -> int:
    """Drop half a window of the context until it fits with the new tokens.

    *Source:* truncation ratio 0.5, CachedAttention §4.1.
    """
    while context > 0 and context + new > window_tokens:
        context = max(0, context - window_tokens // 2)
    return context


def sampled(sessions: Sequence[Session], share: float) -> list[Session]:
    """Return a share of the sessions, the same in every call; chains of supersession stay whole."""
    numbers: dict[int, int] = {}  # of the chosen sessions, in the sample
    found: list[Session] = []
    for number, session in enumerate(sessions):
        before = session.supersedes
        is_taken = _is_drawn(number, share) if before is None else before in numbers
        if is_taken:
            numbers[number] = len(found)
            found.append(
                session if before is None else replace(session, supersedes=numbers[before])
            )
    return found


def _is_drawn(number: int, share: float) -> bool:
    return xxh3_64_intdigest(number.to_bytes(8, "big")) < share * 2**64


def footprint_tokens(sessions: Iterable[Session]) -> int:
    """Return the sum of the sessions' largest contexts: room for it never needs an eviction."""
    return sum(max(turn.kept_tokens for turn in session.turns) for session in sessions)


def read_trace(path: Path) -> list[Session]:
    """Read the sessions of a file, in the order in which they begin.

    Raises:
        BadTraceError: the file cannot be read, or a line is not the next turn of a session.
    """
    found = _SessionParser()
    before_s = 0.0
    for where, line in numbered_lines(path):
        fields = parse_object(where, line)
        at_s = seconds(where, fields, "t")
        check_sorted(where, "t", fields["t"], at_s, before_s)
        before_s = at_s
        found.add(where, fields, at_s)
    sessions = found.sessions()
    if not sessions:
        raise BadTraceError(f"{path}: the trace contains no turn", "give a trace that is not empty")
    return sessions


SessionName = int | str


class _SessionParser:
    """Parses turns into the sessions of a file, in the order in which they begin."""

    def __init__(self) -> None:
        self._numbers: dict[SessionName, int] = {}  # by name, in order of appearance
        self._starts: dict[SessionName, float] = {}
        self._turns: dict[SessionName, list[Turn]] = {}
        self._kept_tokens: dict[SessionName, int] = {}  # the most after one of its turns
        self._supersedes: dict[SessionName, int] = {}
        self._successors: dict[SessionName, SessionName] = {}

    def add(self, where: str, fields: dict[str, Any], at_s: float) -> None:
        """Add the next turn.

        Raises:
            BadTraceError: it is invalid, or not the next turn of its session.
        """
        name = _session_name(where, fields, "session")
        number = whole_number(where, fields, "turn")
        self._check_number(where, name, number)
        turn = _turn(where, fields)
        _check_history(where, turn, name, self._kept_tokens.get(name, 0))
        if "supersedes" in fields:
            self._supersede(where, name, number, fields)
        self._numbers.setdefault(name, len(self._numbers))
        self._kept_tokens[name] = max(self._kept_tokens.get(name, 0), turn.kept_tokens)
        self._starts.setdefault(name, at_s)
        self._turns.setdefault(name, []).append(turn)

    def sessions(self) -> list[Session]:
        """Return all sessions."""
        return [
            Session(self._starts[name], tuple(turns), self._supersedes.get(name))
            for name, turns in self._turns.items()
        ]

    def _check_number(self, where: str, name: SessionName, number: int) -> None:
        expected = len(self._turns.get(name, ())) + 1
        if number != expected:
            raise BadTraceError(
                f"{where}: turn {number} of session {name} is out of order, turn {expected} is "
                "next",
                "sort the trace by t and number each session's turns 1, 2, 3, …",
            )
        if name in self._successors:
            raise BadTraceError(
                f"{where}: session {name} continues, although session {self._successors[name]} "
                "has superseded it",
                "let a session supersede another only after the other's last turn",
            )

    def _supersede(
        self, where: str, name: SessionName, number: int, fields: dict[str, Any]
    ) -> None:
        before = _session_name(where, fields, "supersedes")
        if number > 1:
            raise BadTraceError(
                f"{where}: supersedes is set in turn {number} of session {name}",
                "set it only in the first turn of the session that continues the other",
            )
        if before not in self._numbers:
            raise BadTraceError(
                f"{where}: supersedes is {before}, but no line before this one has that session",
                "name a session all of whose turns precede this line",
            )
        if before in self._successors:
            raise BadTraceError(
                f"{where}: session {before} was already superseded by session "
                f"{self._successors[before]}",
                "let at most one session supersede another",
            )
        self._successors[before] = name
        self._supersedes[name] = self._numbers[before]


# --------------------------------------------------------------- helpers for other formats, too


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, with "file:line" before it.

    Raises:
        BadTraceError: the file cannot be opened, decompressed or decoded.
    """
    number = 0
    with _readable(path, lambda: number), _open(path) as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.decode()
            if not line.isspace():
                yield f"{path}:{number}", line


def first_line(path: Path) -> str:
    """Return the first line that is not blank, at most MAX_HEAD bytes of it; "": there is none.

    Raises:
        BadTraceError: the file cannot be opened, decompressed or decoded.
    """
    with _readable(path, lambda: 1), _open(path) as lines:
        for raw in iter(lambda: lines.readline(MAX_HEAD), b""):
            line = raw.decode(errors="ignore" if len(raw) == MAX_HEAD else "strict")
            if not line.isspace():
                return line
    return ""


def check_sorted(where: str, name: str, value: object, at_s: float, before_s: float) -> None:
    """Raise BadTraceError if a line is earlier than the line before it."""
    if at_s < before_s:
        raise BadTraceError(
            f"{where}: {name} is {value}, which is earlier than in the line before",
            f"sort the trace by {name}",
        )


def parse_object(where: str, line: str) -> dict[str, Any]:
    """Parse a line as a JSON object.

    Raises:
        BadTraceError: the line is no object.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadTraceError(f"{where}: the line is not JSON", _REMEDY) from error
    if not isinstance(fields, dict):
        raise BadTraceError(f"{where}: the line is not a JSON object", _REMEDY)
    return fields


def whole_number(where: str, fields: dict[str, Any], name: str) -> int:
    """Return a field that counts something.

    Raises:
        BadTraceError: the field is missing, no whole number, negative or huge.
    """
    value = _field(where, fields, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad_value(where, name, value, "a whole number")
    _check_bounds(where, name, value, MAX_TOKENS)
    return value


def seconds(where: str, fields: dict[str, Any], name: str) -> float:
    """Return a field that is a time.

    Raises:
        BadTraceError: the field is missing, no number, negative or huge.
    """
    value = _field(where, fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad_value(where, name, value, "a number of seconds")
    _check_bounds(where, name, value, MAX_SECONDS)
    return float(value)


# ------------------------------------------------------------------------------------- internal


@contextmanager
def _readable(path: Path, line_number: Callable[[], int]) -> Iterator[None]:
    """Turn errors of reading a file into a BadTraceError that names the line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadTraceError(
            f"{path}:{line_number()}: the line is not UTF-8 text", _REMEDY
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadTraceError(
            f"{path}:{line_number() + 1}: the gzip data is damaged or ends here",
            "download the file again, or check it with gzip -t",
        ) from error
    except OSError as error:
        raise BadTraceError(
            f"{path}: cannot be read ({error.strerror or error})",
            "give the path of a file that can be read",
        ) from error


def _open(path: Path) -> IO[bytes]:
    """Open a plain or gzip file; refuse pipes and devices, which may never end."""
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "not a regular file"
        raise BadTraceError(f"{path} is {what}", "give the path of a trace file")
    with path.open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
    open_file: Callable[[Path, str], Any] = gzip.open if is_gzip else Path.open
    lines: IO[bytes] = open_file(path, "rb")
    return lines


def _turn(where: str, fields: dict[str, Any]) -> Turn:
    return Turn(
        new_tokens=whole_number(where, fields, "new_tokens"),
        output_tokens=whole_number(where, fields, "output_tokens"),
        history_tokens=whole_number(where, fields, "history_tokens"),
        think_s=seconds(where, fields, "think_s"),
        tools=_tools(where, fields),
    )


def _tools(where: str, fields: dict[str, Any]) -> tuple[str, ...]:
    names = fields.get("tools", [])
    is_list = isinstance(names, list) and len(names) <= MAX_TOOLS
    if not is_list or not all(isinstance(name, str) and name for name in names):
        raise _bad_value(where, "tools", names, f"a list of at most {MAX_TOOLS} names")
    return tuple(map(intern, names))


def _check_history(where: str, turn: Turn, name: SessionName, kept_tokens: int) -> None:
    """Raise BadTraceError if a turn's history is longer than its session can have kept."""
    if turn.history_tokens > kept_tokens:
        raise BadTraceError(
            f"{where}: history_tokens is {turn.history_tokens}, but session {name} has at "
            f"most {kept_tokens} tokens before this turn",
            "give the part of the prompt that earlier turns have left, 0 for a first turn",
        )


def _session_name(where: str, fields: dict[str, Any], field: str) -> SessionName:
    name = _field(where, fields, field)
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise _bad_value(where, field, name, "a number or a name")
    return name


def _field(where: str, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise BadTraceError(f"{where}: there is no {name}", _REMEDY)
    return fields[name]


def _check_bounds(where: str, name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:  # written so that NaN is refused, too
        raise _bad_value(where, name, value, f"a number between 0 and {most:.0f}")


def _bad_value(where: str, name: str, value: object, expected: str) -> BadTraceError:
    return BadTraceError(f"{where}: {name} is {json.dumps(value)[:40]}", f"give {expected}")
