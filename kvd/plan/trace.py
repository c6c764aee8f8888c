"""Sessions of a trace, as they are replayed. Pure but for reading the file.

A trace is newline JSON, plain or gzip, one object a turn, sorted by `t` (arrival, seconds):
`session`, `turn` (1, 2, …), `new_tokens`, `output_tokens`, `history_tokens` (never more than the
session has kept after an earlier turn), `think_s` (from the previous answer's end to this turn).
Other keys are ignored. Of the times of arrival only the first turn's counts: the replay is
closed-loop.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shared.types.errors import InvalidInputError

MAX_TOKENS = 1 << 30  # of one field: far beyond any model's context
MAX_SECONDS = 1e11  # Unix times too
MAX_HEAD = 1 << 20  # bytes of a first line: a list of conversations may be one line of gigabytes
_GZIP = b"\x1f\x8b"
_REMEDY = (
    "give newline JSON, plain or gzip, each line a turn with t, session, turn, new_tokens, "
    "output_tokens, history_tokens, think_s"
)


class BadTraceError(InvalidInputError):
    """A file that is no trace."""

    reason = "bad_trace"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; its prompt is history and new tokens.

    Attributes:
        history_tokens: tokens of the prompt that the session's earlier turns have left.
        think_s: seconds from the end of the previous answer to this turn.
    """

    new_tokens: int
    output_tokens: int
    history_tokens: int
    think_s: float

    @property
    def kept_tokens(self) -> int:
        """What there is to be stored after it."""
        return self.history_tokens + self.new_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Session:
    """One session; it begins at `start_s`."""

    start_s: float
    turns: tuple[Turn, ...]


def truncated(context: int, new: int, window_tokens: int) -> int:
    """Drop half a window of the context until it fits with the new tokens.

    *Source:* truncation ratio 0.5, CachedAttention §4.1.
    """
    while context > 0 and context + new > window_tokens:
        context = max(0, context - window_tokens // 2)
    return context


def footprint_tokens(sessions: Iterable[Session]) -> int:
    """Sum over the sessions of the largest context: room for it never needs an eviction."""
    return sum(max(turn.kept_tokens for turn in session.turns) for session in sessions)


def read_trace(path: Path) -> list[Session]:
    """Read the sessions of a file, in the order in which they begin.

    Raises:
        BadTraceError: the file cannot be read, or a line is not the next turn of a session.
    """
    starts: dict[int | str, float] = {}
    turns: dict[int | str, list[Turn]] = {}
    kept_tokens: dict[int | str, int] = {}  # of each session, the most after one of its turns
    before_s = 0.0
    for where, line in numbered_lines(path):
        fields = parse_object(where, line)
        name = _session_name(where, fields)
        number = whole_number(where, fields, "turn")
        expected = len(turns.get(name, ())) + 1
        if number != expected:
            raise BadTraceError(
                f"{where}: turn {number} of session {name} comes where turn {expected} is due",
                "sort the trace by t and number each session's turns 1, 2, 3, …",
            )
        at_s, turn = seconds(where, fields, "t"), _turn(where, fields)
        check_sorted(where, "t", fields["t"], at_s, before_s)
        before_s = at_s
        _check_history(where, turn, name, kept_tokens.get(name, 0))
        kept_tokens[name] = max(kept_tokens.get(name, 0), turn.kept_tokens)
        starts.setdefault(name, at_s)
        turns.setdefault(name, []).append(turn)
    if not turns:
        raise BadTraceError(f"{path}: no turn in it", "give a trace that is not empty")
    return [Session(starts[name], tuple(turns[name])) for name in turns]


# --------------------------------------------------------- pieces that other formats are read with


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each line that is not blank, after "file:line".

    Raises:
        BadTraceError: the file cannot be opened, decompressed or decoded.
    """
    number = 0
    with _readable(path, lambda: number), _opened(path) as lines:
        for number, raw in enumerate(lines, start=1):
            line = raw.decode()
            if not line.isspace():
                yield f"{path}:{number}", line


def first_line(path: Path) -> str:
    """Return the first line that is not blank, or its first MAX_HEAD bytes; "" if there is none.

    Raises:
        BadTraceError: the file cannot be opened, decompressed or decoded.
    """
    with _readable(path, lambda: 1), _opened(path) as lines:
        for raw in iter(lambda: lines.readline(MAX_HEAD), b""):
            line = raw.decode(errors="ignore" if len(raw) == MAX_HEAD else "strict")
            if not line.isspace():
                return line
    return ""


def check_sorted(where: str, name: str, value: object, at_s: float, before_s: float) -> None:
    """Raise BadTraceError if a line comes before the one before it."""
    if at_s < before_s:
        raise BadTraceError(
            f"{where}: {name} is {value}, earlier than the line before it",
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
        raise BadTraceError(f"{where}: not JSON", _REMEDY) from error
    if not isinstance(fields, dict):
        raise BadTraceError(f"{where}: not a JSON object", _REMEDY)
    return fields


def whole_number(where: str, fields: dict[str, Any], name: str) -> int:
    """Take a field that counts something.

    Raises:
        BadTraceError: the member is missing, no whole number, negative or huge.
    """
    value = _field(where, fields, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad_value(where, name, value, "a whole number")
    _check_bounds(where, name, value, MAX_TOKENS)
    return value


def seconds(where: str, fields: dict[str, Any], name: str) -> float:
    """Take a field that is a time.

    Raises:
        BadTraceError: the member is missing, no number, negative or huge.
    """
    value = _field(where, fields, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad_value(where, name, value, "a number of seconds")
    _check_bounds(where, name, value, MAX_SECONDS)
    return float(value)


# --------------------------------------------------------------------------------------- inside


@contextmanager
def _readable(path: Path, line_number: Callable[[], int]) -> Iterator[None]:
    """Say what is wrong with a file that cannot be read, and in which line."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise BadTraceError(f"{path}:{line_number()}: not text", _REMEDY) from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadTraceError(
            f"{path}:{line_number() + 1}: the gzip data is broken or cut off here",
            "get the file again, or check it with gzip -t",
        ) from error
    except OSError as error:
        raise BadTraceError(
            f"{path}: cannot be read ({error.strerror or error})",
            "give the path of a file that can be read",
        ) from error


def _opened(path: Path) -> IO[bytes]:
    """Open a plain or gzip file; a pipe or a device is none (its end may never come)."""
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "not a regular file"
        raise BadTraceError(f"{path}: is {what}", "give the path of a trace file")
    with path.open("rb") as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
    open_file: Callable[[Path, str], Any] = gzip.open if is_gzip else Path.open
    opened: IO[bytes] = open_file(path, "rb")
    return opened


def _turn(where: str, fields: dict[str, Any]) -> Turn:
    return Turn(
        new_tokens=whole_number(where, fields, "new_tokens"),
        output_tokens=whole_number(where, fields, "output_tokens"),
        history_tokens=whole_number(where, fields, "history_tokens"),
        think_s=seconds(where, fields, "think_s"),
    )


def _check_history(where: str, turn: Turn, name: int | str, kept_tokens: int) -> None:
    """Raise BadTraceError if a turn's history is more than its session can have kept."""
    if turn.history_tokens > kept_tokens:
        raise BadTraceError(
            f"{where}: history_tokens is {turn.history_tokens}, but session {name} has kept"
            f" {kept_tokens} at most before this turn",
            "give what earlier turns have left of the prompt, 0 for a first turn",
        )


def _session_name(where: str, fields: dict[str, Any]) -> int | str:
    name = _field(where, fields, "session")
    if isinstance(name, bool) or not isinstance(name, int | str):
        raise _bad_value(where, "session", name, "a number or a name")
    return name


def _field(where: str, fields: dict[str, Any], name: str) -> Any:
    if name not in fields:
        raise BadTraceError(f"{where}: no {name}", _REMEDY)
    return fields[name]


def _check_bounds(where: str, name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:  # so that NaN is refused too
        raise _bad_value(where, name, value, f"a number between 0 and {most:.0f}")


def _bad_value(where: str, name: str, value: object, expected: str) -> BadTraceError:
    return BadTraceError(f"{where}: {name} is {json.dumps(value)[:40]}", f"give {expected}")
