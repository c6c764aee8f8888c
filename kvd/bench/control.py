"""What very many sessions cost a kvd process: an engine's calls, one at a time; starts; memory.

One kvd for each number of idle sessions; they take turns. Nothing is copied, and nothing is written
to SSD meanwhile (admission on_evict): the figures are those of the control plane.

    prepare_load    of a session that is in DRAM: a hit
    look_up         of an idle session, with other tokens than it has: found, compared, a miss
    prepare_store   of a new session; complete_load and complete_store end the leases

Starts are over a full and over an empty index, in turns; the difference of both is what an idle
session costs in memory.
"""

import random
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import TypeVar

from kvd.bench.figures import Restart, Rounds
from kvd.bench.filled_index import (
    MANIFEST_NAME,
    TOKENS_PER_SESSION,
    FilledIndexes,
    bench_key,
    idle_key,
    token_ids_of,
)
from kvd.bench.options import SMALL_LAYOUT, BenchOptions
from kvd.bench.workspace import Workspace, attached_client, running_kvd
from shared.children.child_kvd import CALL_S, ChildKvd
from shared.children.child_process import ChildFailedError
from shared.kvd_client.client import KvdClient
from shared.kvd_client.grants import Lookup
from shared.measuring.statistics import percentile, spread

T = TypeVar("T")

OPERATIONS = ("prepare_load", "complete_load", "look_up", "prepare_store", "complete_store")
NUM_HOT = 8  # sessions in DRAM that are loaded
HOT_SEED = 1 << 24  # token ids: not those of an idle session
NEW_SEED = 1 << 25
OTHER_SEED = 1 << 26


async def measure_calls(options: BenchOptions, work: Workspace, indexes: FilledIndexes) -> Rounds:
    """Take turns between kvds of all sizes."""
    scale = options.scale
    rounds = Rounds("rpc")
    async with AsyncExitStack() as stack:
        engines = []
        for num_sessions in scale.session_counts:
            options.on_progress(f"control plane, {num_sessions} sessions")
            engines.append(await _attached(options, work, indexes, num_sessions, stack))
        for engine in engines:
            await engine.take(scale.calls_per_round, Rounds("rpc"))  # to warm up
        options.on_progress("control plane, calls")
        for _ in range(scale.rounds):
            for engine in engines:
                await engine.take(scale.calls_per_round, rounds)
    return rounds


async def _attached(
    options: BenchOptions,
    work: Workspace,
    indexes: FilledIndexes,
    num_sessions: int,
    stack: AsyncExitStack,
) -> "_CallingEngine":
    name = f"control-{num_sessions}"
    state_dir = await indexes.state_dir(num_sessions)
    kvd = await stack.enter_async_context(
        running_kvd(work, name, indexes.sizes(options.io_threads), state_dir)
    )
    client = await stack.enter_async_context(attached_client(kvd, SMALL_LAYOUT))
    engine = _CallingEngine(kvd, client, num_sessions)
    await engine.warm_hot_sessions()
    return engine


class _CallingEngine:
    """An engine that asks and answers, and copies nothing."""

    def __init__(self, kvd: ChildKvd, client: KvdClient, num_sessions: int) -> None:
        self._kvd = kvd
        self._client = client
        self._num_sessions = num_sessions
        self._random = random.Random(num_sessions)  # noqa: S311 - which session comes next
        self._num_new = 0

    async def warm_hot_sessions(self) -> None:
        """Store the sessions that are loaded later."""
        ignored: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
        for number in range(NUM_HOT):
            await self._store(f"hot-{number}", HOT_SEED + number, ignored)

    async def take(self, num_calls: int, rounds: Rounds) -> None:
        """Do one turn."""
        await self._kvd.until_quiet()
        turn = rounds.begin(OPERATIONS, self._num_sessions)
        stored = []
        for index in range(num_calls):
            await self._load_hot(index % NUM_HOT, turn)
            await self._look_up(turn)
            self._num_new += 1
            stored.append(f"new-{self._num_new}")
            await self._store(stored[-1], NEW_SEED + self._num_new, turn)
        for name in stored:
            await self._kvd.flush(bench_key(name))

    async def _load_hot(self, number: int, turn: dict[str, list[float]]) -> None:
        tokens = token_ids_of(HOT_SEED + number, TOKENS_PER_SESSION)
        call = self._client.prepare_load(bench_key(f"hot-{number}"), tokens, 0, CALL_S)
        grant = await _timed(turn["prepare_load"], call)
        if grant.end_token != TOKENS_PER_SESSION:
            raise ChildFailedError(f"a stored session misses: {grant.miss_reason}", "report it")
        await _timed(turn["complete_load"], self._client.complete_load(grant))

    async def _look_up(self, turn: dict[str, list[float]]) -> None:
        number = self._random.randrange(self._num_sessions)
        tokens = token_ids_of(OTHER_SEED + number, TOKENS_PER_SESSION)
        call = self._client.prepare_load(idle_key(number), tokens, 0, CALL_S)
        grant = await _timed(turn["look_up"], call)
        if grant.lookup is not Lookup.MISS or grant.miss_reason != "tokens_differ":
            raise ChildFailedError(f"session {number}: {grant.miss_reason or 'a hit'}", "report it")

    async def _store(self, name: str, seed: int, turn: dict[str, list[float]]) -> None:
        tokens = token_ids_of(seed, TOKENS_PER_SESSION)
        call = self._client.prepare_store(bench_key(name), tokens, 0, CALL_S)
        grant = await _timed(turn["prepare_store"], call)
        if grant.refused_reason:
            raise ChildFailedError(f"a store is refused: {grant.refused_reason}", "report it")
        await _timed(turn["complete_store"], self._client.complete_store(grant, success=True))


async def _timed(seconds: list[float], call: Awaitable[T]) -> T:
    started = time.perf_counter()
    answer = await call
    seconds.append(time.perf_counter() - started)
    return answer


async def measure_restart(
    options: BenchOptions, work: Workspace, indexes: FilledIndexes
) -> Restart:
    """Start kvd over a full and over an empty index, in turns."""
    num_sessions = max(options.scale.session_counts)
    options.on_progress(f"restart, an index of {num_sessions} sessions")
    full_dir = await indexes.state_dir(num_sessions)
    empty_dir = await indexes.state_dir(0)
    full, empty = _Starts(), _Starts()
    for turn in range(options.scale.restarts):
        for starts, state_dir in ((empty, empty_dir), (full, full_dir)):
            options.on_progress(f"restart, {state_dir.name}, {turn + 1}")
            name = f"restart-{state_dir.name}-{turn}"
            sizes = indexes.sizes(options.io_threads)
            async with running_kvd(work, name, sizes, state_dir) as kvd:
                starts.ready_s.append(kvd.process.ready_s)
                starts.ready_cpu_s.append(kvd.process.cpu_s())
                await kvd.until_quiet()
                starts.rss_bytes.append(kvd.process.rss_bytes())
                starts.peak_bytes.append(kvd.process.peak_rss_bytes())
                layouts = (await kvd.stats()).layouts
                starts.num_restored = sum(layout.num_sessions for layout in layouts)
    rss, empty_rss = full.median_rss(), empty.median_rss()
    return Restart(
        num_sessions=num_sessions,
        blocks_per_session=indexes.blocks_per_session,
        num_restored=full.num_restored,
        ready_s=spread(full.ready_s),
        ready_cpu_s=spread(full.ready_cpu_s),
        empty_ready_s=spread(empty.ready_s),
        rss_bytes=rss,
        empty_rss_bytes=empty_rss,
        rss_per_session_bytes=(rss - empty_rss) / num_sessions,
        peak_rss_per_session_bytes=(percentile(full.peak_bytes, 0.5) - empty_rss) / num_sessions,
        index_bytes=(full_dir / MANIFEST_NAME).stat().st_size,
    )


class _Starts:
    """What was seen at the starts over one index."""

    def __init__(self) -> None:
        self.ready_s: list[float] = []
        self.ready_cpu_s: list[float] = []
        self.rss_bytes: list[float] = []
        self.peak_bytes: list[float] = []
        self.num_restored = 0

    def median_rss(self) -> int:
        """Return the median resident memory of all starts, in bytes."""
        return int(percentile(self.rss_bytes, 0.5))
