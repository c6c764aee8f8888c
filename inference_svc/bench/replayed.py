"""The sessions that a replay is about: of a trace or generated, scaled, as far as they fit."""

from inference_svc.bench.chat_like import chat_like_sessions
from inference_svc.bench.options import PoliciesOptions, ServeOptions
from inference_svc.bench.trace import Session, fitting, read_trace, scaled


def replayed_sessions(options: ServeOptions | PoliciesOptions) -> tuple[list[Session], int]:
    """The sessions, and how many turns are left out because their context outgrows the window.

    Raises:
        BadTraceError: see read_trace.
    """
    if options.trace is not None:
        sessions = read_trace(options.trace, options.num_sessions)
    else:
        sessions = chat_like_sessions(options.num_sessions, options.seed)
    sessions = scaled(sessions, options.scale, options.think_scale)
    return fitting(sessions, options.window_tokens)


def origin_of(options: ServeOptions | PoliciesOptions) -> str:
    """Where the sessions come from, for people."""
    return "generated" if options.trace is None else options.trace.name


def footprint_tokens(sessions: list[Session]) -> int:
    """Of all contexts at their ends."""
    return sum(turn.new_tokens + turn.output_tokens for turns in sessions for turn in turns)
