"""Part `positions`: hits with and without decoupled positions, over context overflows (Fig. 22).

ca   keys are stored before RoPE: what a truncation keeps is loaded
of   keys are stored after it (coupled): a truncation makes all that was stored useless

The same sessions are replayed by both, each with an empty kvd that has room for all of them: what
is missed is missed because of an overflow. Contexts are truncated as the paper does it: half a
window is dropped as often as it takes until history, new tokens and answer fit.
"""

from dataclasses import replace

from inference_svc.assembly import Model
from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import running_engine
from inference_svc.bench.options import PositionsOptions, RunOptions
from inference_svc.bench.plan_trace import positions_commands, write_plan_trace
from inference_svc.bench.replay import Replay
from inference_svc.bench.trace import Session, overflowing_sessions, overflows
from inference_svc.bench.workspace import Workspace
from inference_svc.runtime.calibration.calibration import calibrate

METRIC = "fu_share"
VARIANTS = ["ca", "of"]
SPARE = 2  # kvd's DRAM, in KV of all that is ever stored


async def measure_positions(
    options: PositionsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Replay the sessions with both."""
    sessions = overflowing_sessions(options)
    coupled = Model(work.model.loaded, calibrate(work.model.loaded, positions="coupled"))
    works = {"ca": work, "of": replace(work, model=coupled)}
    facts = {
        "sessions": len(sessions),
        "turns": sum(map(len, sessions)),
        "window_tokens": options.window_tokens,
        "overflows": overflows(sessions, options.window_tokens),
    }
    found = Interleaved(f"window {options.window_tokens}, {len(sessions)} sessions", facts)
    await take_rounds(
        found,
        lambda _: VARIANTS,
        range(options.rounds),
        lambda variant: _replay(options, run, works[variant], sessions),
        lambda what: run.on_progress(f"positions: {what}"),
    )
    for metric in ("all_share", METRIC, "tok_share"):
        found.compare(metric, "of", "ca")
    found.compare("ttft_mean_s", "of", "ca")
    if options.plan_trace is None:
        return (found.case(),)
    write_plan_trace(
        options.plan_trace, sessions, [0.0] * len(sessions), window_tokens=options.window_tokens
    )
    commands = positions_commands(
        options.plan_trace, options.window_tokens, work.layout.token_bytes
    )
    return (replace(found.case(), notes=tuple(f"the same, planned: {line}" for line in commands)),)


async def _replay(
    options: PositionsOptions, run: RunOptions, work: Workspace, sessions: list[Session]
) -> dict[str, float]:
    stored = sum(turn.new_tokens + turn.output_tokens for turns in sessions for turn in turns)
    async with (
        work.kvd(SPARE * stored) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_rows=4 * (options.max_running + 1) * options.window_tokens,
            cache={"residents": False},
            scheduler={"max_running": options.max_running, "max_turns": max(len(sessions), 256)},
        ) as engine,
    ):
        replay = Replay(
            engine,
            sessions,
            lambda what: run.on_progress(f"positions: {what}"),
            window_tokens=options.window_tokens,
        )
        return (await replay.run(options.max_running)).placement()
