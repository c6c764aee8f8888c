"""The sessions that a replay is about: of a trace or generated, scaled, as far as they fit."""

from inference_svc.bench.chat_like import chat_like_sessions
from inference_svc.bench.options import PoliciesOptions, PositionsOptions, ServeOptions
from inference_svc.bench.trace import PlannedTurn, Session, fitting, read_trace, scaled


def replayed_sessions(options: ServeOptions | PoliciesOptions) -> tuple[list[Session], int]:
    """The sessions, and how many turns are left out because their context outgrows the window.

    Raises:
        BadTraceError: see read_trace.
    """
    sessions = scaled(_drawn(options), options.scale, options.think_scale)
    return fitting(sessions, options.window_tokens)


def overflowing_sessions(options: PositionsOptions) -> list[Session]:
    """The sessions, whatever their contexts come to; each ends before a turn too long by itself.

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
    """How much of a context is left when half a window goes until the turn fits (paper: §4.3.4)."""
    while context_tokens and context_tokens + turn.new_tokens + turn.output_tokens > window_tokens:
        context_tokens = max(0, context_tokens - window_tokens // 2)
    return context_tokens


def overflows(sessions: list[Session], window_tokens: int) -> int:
    """How many turns are preceded by a truncation."""
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
    """Where the sessions come from, for people."""
    return "generated" if options.trace is None else options.trace.name


def footprint_tokens(sessions: list[Session]) -> int:
    """Of all contexts at their ends."""
    return sum(turn.new_tokens + turn.output_tokens for turns in sessions for turn in turns)
