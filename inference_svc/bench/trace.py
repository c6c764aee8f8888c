"""The sessions of a replay: from a trace file or generated, scaled, and cut to fit the window.

A trace is newline JSON, plain or gzip: one object a turn with `session`, `turn`, `new_tokens`,
`output_tokens` and `think_s` (the gap between the previous answer's end and this turn); other keys
(`t`, `history_tokens`, `hash_ids`) are ignored. Replay is closed-loop: a turn comes when its
session's previous answer is complete and the think time has passed. Its history is the session's
context so far in the replay.

Generated sessions resemble ShareGPT's, and are the same for the same seed. Turns: one with
probability 0.27, else two and more, 5.75 in the mean (the paper's sample). Prompts: log-normal,
fitted to ShareGPT's, 2 to 3,000 tokens. Replies: log-normal with the quartiles of ShareGPT's (134,
355 and 800 tokens), times a factor that a session keeps, at most 2,048. Think times: log-normal
with the median of 110 s of a public chat trace, 1 s to an hour.

The planner can be run on the same sessions: they are written as a trace, sorted by `t`, together
with the command. The two processes do not import each other, so that `kvd plan` gets a file. `t` is
as if answers took no time, since `kvd plan` replays closed-loop.
"""

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from shlex import join
from typing import Any

import numpy as np

from inference_svc.bench.options import PoliciesOptions, PositionsOptions, ServeOptions
from shared.types.errors import InvalidInputError

_GZIP = b"\x1f\x8b"


class BadTraceError(InvalidInputError):
    """A file that is not a trace."""

    reason = "bad_trace"


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn to be replayed.

    Attributes:
        new_tokens: number of new tokens in its prompt.
        output_tokens: length of its answer.
        think_s: seconds to wait after the previous answer.
    """

    new_tokens: int
    output_tokens: int
    think_s: float


Session = tuple[PlannedTurn, ...]


def read_trace(path: Path, max_sessions: int) -> list[Session]:
    """Read the first sessions of a file, in the order in which they begin.

    Raises:
        BadTraceError: the file cannot be read, or a line is not a turn.
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
            "give newline-delimited JSON, plain or gzip, with session, turn, new_tokens, "
            "output_tokens and think_s",
        ) from error
    if not sessions:
        raise BadTraceError(f"the trace {path} contains no turn", "give another trace")
    return [tuple(turns) for turns in sessions.values()]


def scaled(sessions: Iterable[Session], scale: float, think_scale: float) -> list[Session]:
    """Multiply lengths and think times; every turn keeps at least one token of each kind."""
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
    """Cut sessions where their context would outgrow the window.

    Returns:
        The sessions that are left, and the number of turns that were cut.
    """
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
        raise ValueError("a length is below 0")
    return turn


SINGLE_TURN_SHARE = 0.27
MORE_TURNS = (1.12, 1.2)  # mean and sigma of the logarithm; capped, 5.75 turns in the mean
MAX_TURNS = 40
PROMPT = (3.14, 1.45, 2, 3000)  # mean and sigma of the logarithm, bounds
REPLY = (6.05, 1.2, 1, 2048)
SESSION_SIGMA = 0.7  # sigma of the factor of a session's replies
THINK = (log(110.0), 1.14, 1.0, 3600.0)


def chat_like_sessions(num_sessions: int, seed: int) -> list[Session]:
    """Generate sessions; the same for the same seed."""
    random = np.random.default_rng(seed)
    return [_session(random) for _ in range(num_sessions)]


def _session(random: np.random.Generator) -> Session:
    num_turns = 1
    if random.random() >= SINGLE_TURN_SHARE:
        num_turns = min(MAX_TURNS, 2 + int(random.lognormal(*MORE_TURNS)))
    factor = random.lognormal(-(SESSION_SIGMA**2) / 2, SESSION_SIGMA)  # 1 in the mean
    return tuple(
        PlannedTurn(
            round(_draw(random, PROMPT)),
            round(_draw(random, REPLY, factor)),
            _draw(random, THINK) if index else 0.0,
        )
        for index in range(num_turns)
    )


def _draw(
    random: np.random.Generator, of: tuple[float, float, float, float], factor: float = 1.0
) -> float:
    mean, sigma, least, most = of
    return float(np.clip(random.lognormal(mean, sigma) * factor, least, most))


def replayed_sessions(options: ServeOptions | PoliciesOptions) -> tuple[list[Session], int]:
    """Return the sessions, and the number of turns cut because their context outgrows the window.

    Raises:
        BadTraceError: see read_trace.
    """
    sessions = scaled(_drawn(options), options.scale, options.think_scale)
    return fitting(sessions, options.window_tokens)


def overflowing_sessions(options: PositionsOptions) -> list[Session]:
    """Return the sessions with contexts of any length; each ends before a turn that is too long.

    Raises:
        BadTraceError: see read_trace.
    """
    whole = []
    for turns in scaled(_drawn(options), options.scale, 0.0):
        too_long = (
            number
            for number, turn in enumerate(turns)
            if turn.new_tokens + turn.output_tokens > options.window_tokens
        )
        whole.append(turns[: next(too_long, len(turns))])
    return [turns for turns in whole if turns]


def truncated(context_tokens: int, turn: PlannedTurn, window_tokens: int) -> int:
    """Drop half a window of a context until the turn fits; return what is left (paper: §4.3.4)."""
    while context_tokens and context_tokens + turn.new_tokens + turn.output_tokens > window_tokens:
        context_tokens = max(0, context_tokens - window_tokens // 2)
    return context_tokens


def overflows(sessions: list[Session], window_tokens: int) -> int:
    """Count the turns before which the context is truncated."""
    num_overflows = 0
    for turns in sessions:
        context = 0
        for turn in turns:
            kept = truncated(context, turn, window_tokens)
            num_overflows += kept < context
            context = kept + turn.new_tokens + turn.output_tokens
    return num_overflows


def _drawn(options: ServeOptions | PoliciesOptions | PositionsOptions) -> list[Session]:
    if options.trace is not None:
        return read_trace(options.trace, options.num_sessions)
    return chat_like_sessions(options.num_sessions, options.seed)


def origin_of(options: ServeOptions | PoliciesOptions) -> str:
    """Describe where the sessions come from, for display."""
    return "generated" if options.trace is None else options.trace.name


def footprint_tokens(sessions: list[Session]) -> int:
    """Return the number of tokens of all contexts at their ends."""
    return sum(turn.new_tokens + turn.output_tokens for turns in sessions for turn in turns)


def plan_command(
    trace: Path,
    options: PoliciesOptions,
    capacity: Mapping[str, int],
    kv_bytes_per_token: int,
    constants: Mapping[str, str],
) -> str:
    """Return the shell command that runs the planner on the same question.

    kvd writes through: blocks in DRAM are on SSD, too. It charges a session's blocks packed.

    Args:
        trace: the trace file written for the planner.
        options: options of the replay.
        capacity: "dram" and "ssd", in bytes.
        kv_bytes_per_token: bytes of a token's KV in the model.
        constants: times of turns, by the planner's options; it has defaults for the others.
    """
    words = {
        "trace": trace,
        "policy": ",".join(options.policies),
        "kv-bytes-per-token": kv_bytes_per_token,
        **capacity,
        "tiers": "inclusive",
        "charge": "packed",
        "ttl": "never",
        "slots": options.max_running,
        "warmup-turns": options.warmup_turns,
        **constants,
    }
    return _command(words, *(["--end-hints"] if options.end_hints else []))


def positions_commands(path: Path, window_tokens: int, kv_bytes_per_token: int) -> list[str]:
    """Return the shell commands that run the planner for coupled positions, with ample tiers."""
    words = {
        "trace": path,
        "policy": "lru",
        "kv-bytes-per-token": kv_bytes_per_token,
        "window": window_tokens,
        "capacity-share": "400%",
        "dram-share": "1",
        "ttl": "never",
        "warmup-turns": 0,
    }
    return [_command(words, "--positions", kind) for kind in ("decoupled", "coupled")]


def _command(words: Mapping[str, object], *more: str) -> str:
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return join(["kvd", "plan", *flags, *more])


def write_plan_trace(
    path: Path,
    sessions: Sequence[Session],
    starts_s: Sequence[float],
    *,
    window_tokens: int = 0,
) -> None:
    """Write the sessions as a trace, each beginning at its time.

    Args:
        path: the file.
        sessions: the sessions.
        starts_s: seconds at which each begins.
        window_tokens: length to which contexts are truncated, as in the replay; 0: they are not.

    Raises:
        OSError: the file cannot be written.
    """
    turns = [
        turn
        for number, session in enumerate(sessions)
        for turn in _turns(number, session, starts_s[number], window_tokens)
    ]
    turns.sort(key=lambda turn: (turn["t"], turn["turn"]))
    lines = "".join(json.dumps(turn) + "\n" for turn in turns)
    path.write_text(lines, encoding="utf-8")


def _turns(
    number: int, session: Session, start_s: float, window_tokens: int
) -> Iterator[dict[str, float]]:
    history, now_s = 0, start_s
    for turn_number, turn in enumerate(session, 1):
        think_s = turn.think_s if turn_number > 1 else 0.0
        now_s += think_s
        if window_tokens:
            history = truncated(history, turn, window_tokens)
        yield {
            "t": round(now_s, 6),
            "session": number,
            "turn": turn_number,
            "new_tokens": turn.new_tokens,
            "output_tokens": turn.output_tokens,
            "history_tokens": history,
            "think_s": think_s,
        }
        history += turn.new_tokens + turn.output_tokens
