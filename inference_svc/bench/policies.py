"""Parts `policies` and `positions`: hits by eviction policy, and by the form of stored keys.

Nothing is kept in the engine's memory, and all history that kvd has is loaded. Every variant and
round begins with an empty kvd and the same sessions.

Policies: kvds differ in their eviction policy. Tiers are small, shares of the KV of all sessions at
their ends, so that sessions have to be evicted. By default all sessions begin at once without think
times: as many turns wait as there are sessions, which is where looking ahead matters.

Positions: hits with context overflows (Fig. 22). There is room for everything, so that a miss is
due to an overflow. Contexts are truncated as in the paper: half a window is dropped as often as
necessary for history, new tokens and answer to fit.

ca   keys are stored before RoPE: KV that a truncation keeps is loaded
of   keys are stored after it (coupled): a truncation makes all stored KV useless
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import numpy as np

from inference_svc.assembly import Model
from inference_svc.bench.bench_session import take_rounds
from inference_svc.bench.figures import Case, Interleaved
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import PoliciesOptions, PositionsOptions, RunOptions
from inference_svc.bench.replay import Replay
from inference_svc.bench.trace import (
    Session,
    footprint_tokens,
    origin_of,
    overflowing_sessions,
    overflows,
    plan_command,
    positions_commands,
    replayed_sessions,
    write_plan_trace,
)
from inference_svc.bench.workspace import KvdSizes, Workspace
from inference_svc.runtime.calibration.calibration import calibrate
from shared.children.child_kvd import ChildKvd

METRIC = "tok_share"
BASE = "lru"  # the policy that the others are compared with
MIN_BLOCKS = 8  # of a tier
MIN_SEGMENT_BYTES = 1 << 20
COUNTED = ("prefetch", "evictions", "ssd_")  # prefixes of kvd's counters that are shown
MAX_LOADING = 1  # turns that load ahead: with more, turns load earlier and find less in DRAM


@dataclass(frozen=True, slots=True)
class Scene:
    """The conditions that are the same for every policy.

    Attributes:
        sessions: the sessions to replay.
        starts_s: seconds at which each session begins.
        dram_bytes: size of kvd's DRAM.
        ssd_bytes: size of kvd's SSD.
    """

    sessions: Sequence[Session]
    starts_s: Sequence[float]
    dram_bytes: int
    ssd_bytes: int


async def measure_policies(
    options: PoliciesOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Replay the sessions with every policy."""
    sessions, num_cut = replayed_sessions(options)
    scene = _scene(options, work, sessions)
    facts = {
        "sessions": len(sessions),
        "turns": sum(map(len, sessions)),
        "turns_left_out": num_cut,
        "tokens": footprint_tokens(sessions),
        "dram_bytes": scene.dram_bytes,
        "ssd_bytes": scene.ssd_bytes,
        "max_running": options.max_running,
    }
    found = Interleaved(f"{origin_of(options)}, {len(sessions)} sessions", facts)
    constants: dict[str, str] = {}

    async def take(policy: str) -> dict[str, float]:
        async with _engine_of(policy, options, work, scene) as engine:
            replay = Replay(
                engine,
                sessions,
                lambda what: run.on_progress(f"policy {policy}: {what}"),
                end_hints=options.end_hints,
                warmup_turns=options.warmup_turns,
                starts_s=scene.starts_s,
            )
            values = await _run_replay(replay)
            constants.update(_constants(replay, options.max_running))
        return values

    await take_rounds(
        found,
        lambda _: list(options.policies),
        range(options.rounds),
        take,
        lambda what: run.on_progress(f"policies: {what}"),
    )
    for policy in options.policies:
        if policy != BASE:
            found.compare(METRIC, policy, BASE)
    if options.plan_trace is None:
        return (found.case(),)
    write_plan_trace(options.plan_trace, sessions, scene.starts_s)
    capacity = {"dram": scene.dram_bytes, "ssd": scene.ssd_bytes}
    command = plan_command(
        options.plan_trace, options, capacity, work.layout.token_bytes, constants
    )
    return (replace(found.case(), notes=(f"the same, planned: {command}",)),)


def _scene(options: PoliciesOptions, work: Workspace, sessions: list[Session]) -> Scene:
    starts_s = [0.0] * len(sessions)
    if options.arrivals_per_s:
        random = np.random.default_rng(options.seed)
        gaps_s = random.exponential(1 / options.arrivals_per_s, len(sessions))
        starts_s = [float(start_s) for start_s in np.cumsum(gaps_s)]
    footprint_bytes = footprint_tokens(sessions) * work.layout.token_bytes
    least_bytes = MIN_BLOCKS * work.layout.block_bytes
    return Scene(
        sessions,
        starts_s,
        dram_bytes=max(least_bytes, int(options.dram_share * footprint_bytes)),
        ssd_bytes=max(least_bytes, int(options.ssd_share * footprint_bytes)),
    )


async def _run_replay(replay: Replay) -> dict[str, float]:
    """Run a replay; return its metrics, and the increase of kvd's counters."""
    kvd = replay.engine.kvd
    assert kvd is not None, "its policy is measured"  # noqa: S101
    await replay.warm_up()
    await kvd.flush()
    before = await _counters(kvd)
    log = await replay.run(len(replay.sessions))
    await replay.engine.settle()
    counters = await _counters(kvd)
    return log.placement() | {name: value - before[name] for name, value in counters.items()}


async def _counters(kvd: ChildKvd) -> dict[str, float]:
    """Return kvd's counters so far."""
    (layout,) = (await kvd.stats()).layouts
    return {
        name: float(count)
        for name, count in sorted(layout.counters.items())
        if name.startswith(COUNTED)
    }


def _constants(replay: Replay, max_running: int) -> dict[str, str]:
    """Return the times of turns as options of `kvd plan`; empty if they cannot be fitted."""
    steps = replay.engine.parts.rates.steps.as_dict()
    if not steps:
        return {}
    # A token costs more the longer its context is; the mean prompt stands for it.
    mean_prompt_tokens = replay.log.prompt_tokens / max(1, len(replay.log.turns))
    token_s = steps["step_token_s"] + steps["step_pair_s"] * mean_prompt_tokens
    found_s = {
        "prefill-ms-per-token": token_s,
        "decode-step-ms": steps["step_constant_s"] + max_running * token_s,
        "fixed-ms": steps["step_constant_s"],
    }
    return {name: f"{seconds * 1e3:.3g}" for name, seconds in found_s.items()}


@asynccontextmanager
async def _engine_of(
    policy: str, options: PoliciesOptions, work: Workspace, scene: Scene
) -> AsyncIterator[LocalEngine]:
    sizes = KvdSizes(
        scene.dram_bytes,
        scene.ssd_bytes,
        segment_bytes=max(MIN_SEGMENT_BYTES, 4 * work.layout.block_bytes),
        policy=policy,
    )
    async with (
        work.kvd_of(sizes) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_tokens=2 * (options.max_running + MAX_LOADING) * options.window_tokens,
            cache={"residents": False},
            scheduler={
                "max_running": options.max_running,
                "max_loading": MAX_LOADING,
                "max_turns": max(len(scene.sessions), 256),
                "answer_tokens": min(256, options.window_tokens),
            },
        ) as engine,
    ):
        yield engine


FOUND_METRIC = "fu_share"
POSITIONS = ["ca", "of"]
SPARE = 2  # kvd's DRAM, in multiples of the KV of all tokens


async def measure_positions(
    options: PositionsOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Replay the sessions with both forms of keys."""
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
        lambda _: POSITIONS,
        range(options.rounds),
        lambda variant: _replay_overflowing(options, run, works[variant], sessions),
        lambda what: run.on_progress(f"positions: {what}"),
    )
    for metric in ("all_share", FOUND_METRIC, "tok_share"):
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


async def _replay_overflowing(
    options: PositionsOptions, run: RunOptions, work: Workspace, sessions: list[Session]
) -> dict[str, float]:
    stored = sum(turn.new_tokens + turn.output_tokens for turns in sessions for turn in turns)
    async with (
        work.kvd(SPARE * stored) as kvd,
        running_engine(
            work.model,
            kvd,
            kv_tokens=4 * (options.max_running + 1) * options.window_tokens,
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
