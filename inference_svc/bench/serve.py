"""Part `serve`: whole conversations, replayed closed-loop, with reuse and without.

So many sessions are open at once. Each says its turns one after another: the next one comes when
the answer is complete and the user has thought. When a session is through, the next opens.

    ca    as the service is configured by default: kvd, and resident sessions
    kvd   without resident sessions
    re    every history is computed again

Every variant and round begins with an empty kvd and the same sessions.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import RunOptions, ServeOptions
from inference_svc.bench.replay import Replay
from inference_svc.bench.trace import Session, footprint_tokens, origin_of, replayed_sessions
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
    await take_rounds(
        found,
        lambda _: list(options.variants),
        range(options.rounds),
        lambda name: _measure(name, options, run, work, sessions),
        lambda what: run.on_progress(f"serve: {what}"),
    )
    for metric in (METRIC, "ttft_p99_s", "elapsed_s", "busy_s"):
        found.compare(metric, "re", "ca")
        found.compare(metric, "re", "kvd")
    return (found.case(),)


async def _measure(
    name: str, options: ServeOptions, run: RunOptions, work: Workspace, sessions: list[Session]
) -> dict[str, float]:
    async with _engine_of(name, options, work, sessions) as engine:
        replay = Replay(
            engine,
            sessions,
            lambda what: run.on_progress(f"serve: {what}"),
            source="any",
            keeps=name != "re",
        )
        await replay.warm_up()
        return (await replay.run(options.concurrent)).serving()


@asynccontextmanager
async def _engine_of(
    name: str, options: ServeOptions, work: Workspace, sessions: list[Session]
) -> AsyncIterator[LocalEngine]:
    kv_tokens = 3 * options.max_running * options.window_tokens
    scheduler = {
        "max_running": options.max_running,
        "max_turns": max(options.concurrent, 256),
        "answer_tokens": min(256, options.window_tokens),
    }
    if name == "re":
        async with running_engine(
            work.model, None, kv_tokens=kv_tokens, scheduler=scheduler
        ) as engine:
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
            kv_tokens=kv_tokens,
            cache={"residents": name == "ca"},
            scheduler=scheduler,
        ) as engine,
    ):
        yield engine
