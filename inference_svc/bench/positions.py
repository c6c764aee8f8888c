"""Part `positions`: hits with and without decoupled positions, over context overflows (Fig. 22).

ca   keys are stored before RoPE: what a truncation keeps is loaded
of   keys are stored after it (coupled): a truncation makes all that was stored useless

The same sessions are replayed by both, each with an empty kvd that has room for all of them: what
is missed is missed because of an overflow. Contexts are truncated as the paper does it: half a
window is dropped as often as it takes until history, new tokens and answer fit.
"""

import asyncio
from dataclasses import replace
from time import perf_counter

from inference_svc.assembly import Model
from inference_svc.bench.bench_session import in_turn
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import PositionsOptions, RunOptions
from inference_svc.bench.plan_trace import positions_commands, write_plan_trace
from inference_svc.bench.policy_log import PolicyLog, ReplayedTurn
from inference_svc.bench.replayed import overflowing_sessions, overflows, truncated
from inference_svc.bench.trace import Session
from inference_svc.bench.workspace import Workspace
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.engine.engine_request import ContextCut

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
    for round_number in range(options.rounds):
        for variant in in_turn(VARIANTS, round_number):
            run.on_progress(f"positions, {variant}: round {round_number + 1}/{options.rounds}")
            found.add(variant, round_number, await _replay(options, run, works[variant], sessions))
    for metric in ("all_share", METRIC, "tok_share"):
        found.compare_gain(metric, "of", "ca")
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
        return await _Replay(engine, options, run, sessions).run()


class _Replay:
    """One replay; as many sessions at once as turns may run."""

    def __init__(
        self,
        engine: LocalEngine,
        options: PositionsOptions,
        run: RunOptions,
        sessions: list[Session],
    ) -> None:
        self._engine = engine
        self._window_tokens = options.window_tokens
        self._places = asyncio.Semaphore(options.max_running)
        self._run = run
        self._sessions = sessions
        self._log = PolicyLog()
        self._num_done = 0

    async def run(self) -> dict[str, float]:
        """Say everything; returns the metrics."""
        busy_s, started_s = self._engine.busy_s, perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(self._sessions)):
                tasks.create_task(self._say(index))
        return self._log.values(perf_counter() - started_s, self._engine.busy_s - busy_s)

    async def _say(self, index: int) -> None:
        engine, context, num_computed = self._engine, list[int](), 0
        key = engine.key(f"session-{index}")
        async with self._places:
            for turn in self._sessions[index]:
                num_kept = truncated(len(context), turn, self._window_tokens)
                num_dropped = len(context) - num_kept
                if num_dropped:
                    await engine.parts.engine.discard(key, ContextCut(context, [(0, num_dropped)]))
                    context = context[num_dropped:]
                    num_computed = max(0, num_computed - num_dropped)
                prompt = [*context, *engine.new_tokens(turn.new_tokens)]
                end = len(prompt) + turn.output_tokens
                num_ahead = len(engine.parts.engine.scheduler.queue)
                times = await engine.turn(
                    key, prompt, turn.output_tokens, source="kvd", keep_tokens=end - 1
                )
                self._log.add(ReplayedTurn(times, num_computed, len(prompt), num_ahead))
                context, num_computed = [*prompt, *times.output_ids], end - 1
        self._num_done += 1
        self._run.on_progress(f"positions: {self._num_done}/{len(self._sessions)} sessions")
