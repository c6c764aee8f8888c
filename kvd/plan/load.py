"""How much work a trace is, as a share of one engine's time. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from kvd.plan.hardware import EngineConstants
from kvd.plan.trace import Session, Turn

STRAY_SHARE = 0.01  # of the sessions, at either end, that may come long before or after the others


def recompute_load(sessions: Sequence[Session], engine: EngineConstants) -> float:
    """Engine time per second of arrivals, if nothing is ever loaded; above 1 queues grow.

    How long the arrivals take is told from all but the first and the last hundredth of the
    sessions: a few stray ones would make a trace look idle. 0 if they all come at once.
    """
    starts = sorted(session.start_s for session in sessions)
    num_stray = int(len(starts) * STRAY_SHARE)
    span_s = starts[-1 - num_stray] - starts[num_stray]
    if not span_s:
        return 0.0
    span_s *= (len(starts) - 1) / (len(starts) - 1 - 2 * num_stray)
    work_s = sum(_recompute_s(turn, engine) for session in sessions for turn in session.turns)
    return work_s / span_s


def engine_at_load(
    sessions: Sequence[Session], engine: EngineConstants, load: float
) -> EngineConstants:
    """An engine that is so much faster or slower that the sessions are that much work for it.

    Arrivals and think times stay what they are: drawn apart, sessions would no longer overlap. An
    engine for sessions that come all at once is the one given.
    """
    factor = load / (recompute_load(sessions, engine) or load)
    return replace(
        engine,
        prefill_s_per_token=engine.prefill_s_per_token * factor,
        decode_step_s=engine.decode_step_s * factor,
        fixed_s=engine.fixed_s * factor,
    )


def _recompute_s(turn: Turn, engine: EngineConstants) -> float:
    """A decode's share of the engine is that of its slot."""
    return (
        engine.fixed_s
        + (turn.history_tokens + turn.new_tokens) * engine.prefill_s_per_token
        + turn.output_tokens * engine.decode_step_s / engine.slots
    )
