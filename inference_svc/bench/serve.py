"""Part `serve`: whole conversations, replayed closed-loop, with reuse and without.

So many sessions are open at once. Each says its turns one after another: the next one comes when
the answer is complete and the user has thought. When a session is through, the next opens.

    ca    as the service is configured by default: kvd, and resident sessions
    kvd   without resident sessions
    re    every history is computed again

Every variant and round begins with an empty kvd and the same sessions.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from inference_svc.bench.bench_session import in_turn
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import RunOptions, ServeOptions
from inference_svc.bench.replay_log import ReplayLog
from inference_svc.bench.replayed import footprint_tokens, origin_of, replayed_sessions
from inference_svc.bench.trace import Session
from inference_svc.bench.workspace import Workspace

METRIC = "ttft_p50_s"
SSD_FACTOR = 2  # of all sessions' KV: so much is room on SSD


async def measure_serve(
    options: ServeOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Replay the sessions with every variant."""
    sessions, num_cut = replayed_sessions(options)
    facts = {
        "sessions": len(sessions),
        "turns": sum(map(len, sessions)),
        "turns_left_out": num_cut,
        "concurrent": options.concurrent,
        "tokens": footprint_tokens(sessions),
    }
    found = Interleaved(f"{origin_of(options)}, {options.concurrent} open", facts)
    for round_number in range(options.rounds):
        for name in in_turn(list(options.variants), round_number):
            run.on_progress(f"serve {name}: round {round_number + 1}/{options.rounds}")
            values = await _measure(name, options, run, work, sessions)
            found.add(name, round_number, values)
    for metric in (METRIC, "ttft_p99_s", "elapsed_s", "busy_s"):
        found.compare_gain(metric, "re", "ca")
        found.compare_gain(metric, "re", "kvd")
    return (found.case(),)


async def _measure(
    name: str, options: ServeOptions, run: RunOptions, work: Workspace, sessions: list[Session]
) -> dict[str, float]:
    async with _engine_of(name, options, work, sessions) as engine:
        replay = _Replay(engine, run, sessions, keeps=name != "re")
        return await replay.run(options.concurrent)


@asynccontextmanager
async def _engine_of(
    name: str, options: ServeOptions, work: Workspace, sessions: list[Session]
) -> AsyncIterator[LocalEngine]:
    rows = 3 * options.max_running * options.window_tokens
    scheduler = {
        "max_running": options.max_running,
        "max_turns": max(options.concurrent, 256),
        "answer_tokens": min(256, options.window_tokens),
    }
    if name == "re":
        async with running_engine(work.model, None, kv_rows=rows, scheduler=scheduler) as engine:
            yield engine
        return
    num_tokens = footprint_tokens(sessions)
    async with (
        work.kvd(
            2 * num_tokens, ssd_tokens=SSD_FACTOR * num_tokens, dram_bytes=options.dram_mib << 20
        ) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_rows=rows,
            cache={"residents": name == "ca"},
            scheduler=scheduler,
        ) as engine,
    ):
        yield engine


class _Replay:
    """One replay by one engine."""

    def __init__(
        self, engine: LocalEngine, run: RunOptions, sessions: list[Session], *, keeps: bool
    ) -> None:
        self._engine = engine
        self._run = run
        self._sessions = sessions
        self._keeps = keeps
        self._log = ReplayLog()

    async def run(self, num_concurrent: int) -> dict[str, float]:
        """Say everything; returns the metrics."""
        warm_up = self._engine.new_tokens(64)
        await self._engine.turn(self._engine.key("warm-up"), warm_up, 8, source="any")
        await self._engine.settle()
        busy_s, started_s = self._engine.busy_s, time.perf_counter()
        queue = iter(enumerate(self._sessions))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_concurrent):
                tasks.create_task(self._say_all(queue))
        elapsed_s = time.perf_counter() - started_s
        return self._log.values(elapsed_s, self._engine.busy_s - busy_s)

    async def _say_all(self, queue: Iterator[tuple[int, Session]]) -> None:
        for index, session in queue:
            await self._say(index, session)
            self._run.on_progress(f"serve: session {index + 1}/{len(self._sessions)} is through")

    async def _say(self, index: int, session: Session) -> None:
        engine, context, num_computed = self._engine, list[int](), 0
        for turn in session:
            await asyncio.sleep(turn.think_s)
            prompt = [*context, *engine.new_tokens(turn.new_tokens)]
            end = len(prompt) + turn.output_tokens
            times = await engine.turn(
                engine.key(f"session-{index}"),
                prompt,
                turn.output_tokens,
                source="any",
                keep_tokens=end - 1 if self._keeps else 0,
                history_tokens=num_computed,
            )
            self._log.add(times, num_computed, len(prompt))
            context, num_computed = [*prompt, *times.output_ids], end - 1
