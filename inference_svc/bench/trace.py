"""Sessions to replay: read from a trace file, scaled. Pure but for reading the file.

A trace is newline JSON, plain or gzip: one object a turn with `session`, `turn`, `new_tokens`,
`output_tokens` and `think_s` (the gap between the previous answer's end and this turn); other
keys (`t`, `history_tokens`, `hash_ids`) are ignored. Replay is closed-loop: a turn comes when its
session's previous answer is complete and the user has thought. Its history is what the session has
said so far in the replay.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.types.errors import InvalidInputError

_GZIP = b"\x1f\x8b"


class BadTraceError(InvalidInputError):
    """A file that is no trace."""

    reason = "bad_trace"


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn to be.

    Attributes:
        think_s: to wait after the previous answer.
    """

    new_tokens: int
    output_tokens: int
    think_s: float


Session = tuple[PlannedTurn, ...]


def read_trace(path: Path, max_sessions: int) -> list[Session]:
    """The first sessions of a file, in the order in which they begin.

    Raises:
        BadTraceError: it cannot be read, or a line is not a turn.
    """
    sessions: dict[object, list[PlannedTurn]] = {}
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == _GZIP
        with gzip.open(path, "rt") if is_gzip else path.open(encoding="utf-8") as lines:
            for line in lines:
                fields = json.loads(line)
                known = fields["session"] in sessions
                if known or len(sessions) < max_sessions:
                    sessions.setdefault(fields["session"], []).append(_turn(fields))
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise BadTraceError(
            f"{path} is not a trace ({cause})",
            "give newline JSON, plain or gzip: session, turn, new_tokens, output_tokens, think_s",
        ) from error
    if not sessions:
        raise BadTraceError(f"{path} holds no turn", "give another trace")
    return [tuple(turns) for turns in sessions.values()]


def scaled(sessions: Iterable[Session], scale: float, think_scale: float) -> list[Session]:
    """Multiply lengths and think times; every turn keeps at least a token of each."""
    return [
        tuple(
            PlannedTurn(
                max(1, round(turn.new_tokens * scale)),
                max(1, round(turn.output_tokens * scale)),
                turn.think_s * think_scale,
            )
            for turn in turns
        )
        for turns in sessions
    ]


def fitting(sessions: Sequence[Session], window_tokens: int) -> tuple[list[Session], int]:
    """Cut sessions where their context would outgrow the window; and how many turns that costs."""
    kept = [turns[: _num_fitting(turns, window_tokens)] for turns in sessions]
    num_cut = sum(len(turns) for turns in sessions) - sum(len(turns) for turns in kept)
    return [turns for turns in kept if turns], num_cut


def _num_fitting(turns: Session, window_tokens: int) -> int:
    context = 0
    for index, turn in enumerate(turns):
        context += turn.new_tokens + turn.output_tokens
        if context > window_tokens:
            return index
    return len(turns)


def _turn(fields: dict[str, Any]) -> PlannedTurn:
    turn = PlannedTurn(
        int(fields["new_tokens"]), int(fields["output_tokens"]), float(fields["think_s"])
    )
    if turn.new_tokens < 0 or turn.output_tokens < 0 or turn.think_s < 0:
        raise ValueError("a length below zero")
    return turn
