"""Part `policies`: the same sessions replayed by kvds that differ in who goes first.

Tiers are small, parts of what all sessions have at their ends, so that something has to go. By
default all sessions begin at once and nobody thinks: as many turns wait as there are sessions,
which is where looking ahead matters. Nothing is kept in the engine's memory, and every history that
kvd has is loaded: what is measured is placement.

Every policy and round begins with an empty kvd.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np

from inference_svc.bench.bench_session import in_turn
from inference_svc.bench.figures import Case
from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.kvd_sizes import KvdSizes
from inference_svc.bench.local_engine import LocalEngine, running_engine
from inference_svc.bench.options import PoliciesOptions, RunOptions
from inference_svc.bench.plan_trace import EngineConstants, plan_command, write_plan_trace
from inference_svc.bench.policy_replay import PolicyReplay, Scene
from inference_svc.bench.replayed import footprint_tokens, origin_of, replayed_sessions
from inference_svc.bench.trace import Session
from inference_svc.bench.workspace import Workspace

METRIC = "tok_share"
BASE = "lru"  # what the others are compared with
MIN_BLOCKS = 8  # of a tier
MIN_SEGMENT_BYTES = 1 << 20
MAX_LOADING = 1  # turns that are loaded ahead: earlier ones would find less in DRAM


async def measure_policies(
    options: PoliciesOptions, run: RunOptions, work: Workspace
) -> tuple[Case, ...]:
    """Replay the sessions with every policy."""
    sessions, num_cut = replayed_sessions(options)
    scene = _scene(options, work, sessions)
    facts = {
        "sessions": len(sessions),
        "turns": scene.num_turns,
        "turns_left_out": num_cut,
        "tokens": footprint_tokens(sessions),
        "dram_bytes": scene.dram_bytes,
        "ssd_bytes": scene.ssd_bytes,
        "max_running": options.max_running,
    }
    found = Interleaved(f"{origin_of(options)}, {len(sessions)} sessions", facts)
    constants: EngineConstants | None = None
    for round_number in range(options.rounds):
        for policy in in_turn(list(options.policies), round_number):
            run.on_progress(f"policy {policy}: round {round_number + 1}/{options.rounds}")
            async with _engine_of(policy, options, work, scene) as engine:
                replay = PolicyReplay(engine, options, run, scene)
                found.add(policy, round_number, await replay.run())
                constants = replay.constants() or constants
    for policy in options.policies:
        if policy != BASE:
            found.compare_gain(METRIC, policy, BASE)
    if options.plan_trace is None:
        return (found.case(),)
    write_plan_trace(options.plan_trace, sessions, scene.starts_s)
    command = plan_command(options.plan_trace, options, scene, work.layout.token_bytes, constants)
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
            kv_rows=2 * (options.max_running + MAX_LOADING) * options.window_tokens,
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
