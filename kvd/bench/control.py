"""The cost of very many sessions for kvd: calls, starts, memory, and the loop's longest calls.

There is one kvd for each number of idle sessions; they take turns. Nothing is copied, and nothing
is written to SSD meanwhile (admission on_evict): the results are those of the control plane.

    prepare_load    of a session that is in DRAM: a hit
    look_up         of an idle session, with other tokens than it has: found, compared, a miss
    prepare_store   of a new session; complete_load and complete_store end the leases

Starts are measured over a full and an empty index, in turns; the difference gives the memory of an
idle session.

Each of the event loop's longest calls stops every engine. To measure them, the pure engine is
started over a real index, and gets the calls of a kvd's loop: each call includes draining the
actions that follow, but not performing them. The processor time of this thread is measured, so a
busy machine does not matter. The garbage collector skips restored sessions and other old objects,
as in a kvd.
"""

import random
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from kvd.bench.figures import LoopCalls, Restart, Rounds
from kvd.bench.filled_index import (
    SALT,
    TOKENS_PER_SESSION,
    FilledIndexes,
    bench_key,
    idle_key,
    token_ids_of,
)
from kvd.bench.lookups import MemoryPerformer
from kvd.bench.options import SMALL_LAYOUT, BenchOptions
from kvd.bench.workspace import Workspace, attached_client, running_kvd
from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import POLICIES
from kvd.core.state.limits import Limits, TenantLimits
from kvd.tiers.faults import NoFaults
from kvd.tiers.index_database import MANIFEST_NAME
from kvd.tiers.manifest import Manifest
from shared.children.child_kvd import CALL_S, ChildKvd
from shared.children.child_process import ChildFailedError
from shared.kvd_client.client import KvdClient
from shared.measuring.statistics import percentile, spread
from shared.process import memory
from shared.types.granted_slots import Lookup
from shared.types.units import NS_PER_S

T = TypeVar("T")

OPERATIONS = ("prepare_load", "complete_load", "look_up", "prepare_store", "complete_store")
NUM_HOT = 8  # sessions in DRAM that are loaded
HOT_SEED = 1 << 24  # seeds of token ids; above those of idle sessions
NEW_SEED = 1 << 25
OTHER_SEED = 1 << 26
# For the pure engine, to measure the longest calls of the loop.
POLICY = "predictive"  # the default one
ENGINE_ID = 1
NUM_SLOTS = 512
NUM_STORES = 100  # of new sessions while the SSD tier is full
TICKS_SHARE = 500  # sessions per timer call until a reload's quota is enforced
NUM_TICKS = 200  # timer calls, at most, that expire sessions
TTL_NS = 3600 * NS_PER_S
NOW_NS = 1 << 40
STORED_SEED = 1 << 27


async def measure_calls(options: BenchOptions, work: Workspace, indexes: FilledIndexes) -> Rounds:
    """Measure kvds with all numbers of sessions, in turns."""
    scale = options.scale
    rounds = Rounds("rpc")
    async with AsyncExitStack() as stack:
        engines = []
        for num_sessions in scale.session_counts:
            options.on_progress(f"control plane, {num_sessions} sessions")
            engines.append(await _attach(options, work, indexes, num_sessions, stack))
        for engine in engines:
            await engine.take(scale.calls_per_round, Rounds("rpc"))  # to warm up
        options.on_progress("control plane, calls")
        for _ in range(scale.rounds):
            for engine in engines:
                await engine.take(scale.calls_per_round, rounds)
    return rounds


async def _attach(
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
    """An engine that makes calls, and copies nothing."""

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
        """Measure one kvd's turn of a round."""
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
            raise ChildFailedError(
                f"a stored session was not found: {grant.miss_reason}", "this is a bug: report it"
            )
        await _timed(turn["complete_load"], self._client.complete_load(grant))

    async def _look_up(self, turn: dict[str, list[float]]) -> None:
        number = self._random.randrange(self._num_sessions)
        tokens = token_ids_of(OTHER_SEED + number, TOKENS_PER_SESSION)
        call = self._client.prepare_load(idle_key(number), tokens, 0, CALL_S)
        grant = await _timed(turn["look_up"], call)
        if grant.lookup is not Lookup.MISS or grant.miss_reason != "tokens_differ":
            raise ChildFailedError(
                f"session {number} should have been missed: {grant.miss_reason or 'it was a hit'}",
                "this is a bug: report it",
            )

    async def _store(self, name: str, seed: int, turn: dict[str, list[float]]) -> None:
        tokens = token_ids_of(seed, TOKENS_PER_SESSION)
        call = self._client.prepare_store(bench_key(name), tokens, 0, CALL_S)
        grant = await _timed(turn["prepare_store"], call)
        if grant.refused_reason:
            raise ChildFailedError(
                f"a store was refused: {grant.refused_reason}", "this is a bug: report it"
            )
        await _timed(turn["complete_store"], self._client.complete_store(grant, success=True))


async def _timed(seconds: list[float], call: Awaitable[T]) -> T:
    started = time.perf_counter()
    answer = await call
    seconds.append(time.perf_counter() - started)
    return answer


async def measure_restart(
    options: BenchOptions, work: Workspace, indexes: FilledIndexes
) -> Restart:
    """Measure starts over a full and an empty index, in turns."""
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
    """Measurements of the starts over one index."""

    def __init__(self) -> None:
        self.ready_s: list[float] = []
        self.ready_cpu_s: list[float] = []
        self.rss_bytes: list[float] = []
        self.peak_bytes: list[float] = []
        self.num_restored = 0

    def median_rss(self) -> int:
        """Return the median resident memory of all starts, in bytes."""
        return int(percentile(self.rss_bytes, 0.5))


def measure_loop_calls(options: BenchOptions, indexes: FilledIndexes, state_dir: Path) -> LoopCalls:
    """Start the pure engine over an index, and time the loop's longest calls."""
    num_sessions = max(options.scale.session_counts)
    options.on_progress(f"the loop's longest calls, {num_sessions} sessions")
    with memory.freezing_survivors():
        return _measure_run(open_run(options, indexes, state_dir), num_sessions, indexes)


def _measure_run(run: "LoopRun", num_sessions: int, indexes: FilledIndexes) -> LoopCalls:
    attach_s = run.time_call(lambda: run.engine.add_slots(NUM_SLOTS, 1))
    look_s = run.expire(NUM_TICKS, NS_PER_S)
    store_s = max(run.store(number) for number in range(NUM_STORES))
    reload_s = run.give_quota(num_sessions * indexes.blocks_per_session)
    reload_s = max(reload_s, run.expire(num_sessions // TICKS_SHARE, 1))
    run.now_ns += TTL_NS
    expire_s = run.expire(NUM_TICKS, NS_PER_S)
    return LoopCalls(
        num_sessions=num_sessions,
        blocks_per_session=indexes.blocks_per_session,
        policy=POLICY,
        restore_cpu_s=run.restore_cpu_s,
        attach_ms=attach_s * 1e3,
        look_ms=look_s * 1e3,
        store_ms=store_s * 1e3,
        reload_ms=reload_s * 1e3,
        expire_ms=expire_s * 1e3,
    )


def open_run(options: BenchOptions, indexes: FilledIndexes, state_dir: Path) -> "LoopRun":
    """Start an engine over an index whose sessions fill the SSD tier."""
    num_sessions = max(options.scale.session_counts)
    limits = Limits(
        num_slots=0,
        num_extents=num_sessions * indexes.blocks_per_session,
        max_sessions=num_sessions,
        default_ttl_ns=NOW_NS + TTL_NS,  # the sessions were last used at time 0
        prefetch_bytes=32 << 20,
        watermark=0.02,
    )
    with memory.gc_paused():
        return LoopRun(limits, state_dir)


class LoopRun:
    """An engine over an index, with a clock of its own."""

    def __init__(self, limits: Limits, state_dir: Path) -> None:
        self.now_ns = NOW_NS
        self._limits = limits
        self.engine = CacheEngine(SMALL_LAYOUT, limits, lambda _tenant: SALT, POLICIES[POLICY])
        self._performer = MemoryPerformer(self.engine)
        manifest = Manifest(state_dir / MANIFEST_NAME, state_dir / "volumes", NoFaults())
        manifest.open()
        try:
            started = time.thread_time()
            rows = manifest.rows(SMALL_LAYOUT)
            self.engine.advance(self.now_ns)
            self.engine.restore(rows, (), (), 1)
            self.engine.drain()
            self.restore_cpu_s = time.thread_time() - started
        finally:
            manifest.close()

    def time_call(self, call: Callable[[], object]) -> float:
        """Make a call, perform its actions, and return the time of the call alone, in seconds."""
        started = time.thread_time()
        self.engine.advance(self.now_ns)
        call()
        actions = self.engine.drain()
        self.engine.next_deadline_ns()
        took_s = time.thread_time() - started
        self._performer.perform(actions, {})
        self._performer.settle({})
        return took_s

    def expire(self, num_ticks: int, step_ns: int) -> float:
        """Advance the clock step by step; return the time of the longest call."""
        longest_s = 0.0
        for _ in range(num_ticks):
            self.now_ns += step_ns
            longest_s = max(longest_s, self.time_call(self.engine.expire))
        return longest_s

    def give_quota(self, num_blocks: int) -> float:
        """Give the tenant with all the sessions its first quota; return the time of the call."""
        quota = TenantLimits(quota_bytes=num_blocks * SMALL_LAYOUT.block_bytes)
        self._limits = replace(self._limits, tenant_limits=lambda _tenant: quota)
        return self.time_call(lambda: self.engine.set_limits(self._limits))

    def store(self, number: int) -> float:
        """Store a new session, which evicts an idle one; return the time of the longest call."""
        self.now_ns += 1
        key, tokens = (
            bench_key(f"longest-{number}"),
            token_ids_of(STORED_SEED + number, TOKENS_PER_SESSION),
        )
        lease_id = 0

        def prepare() -> None:
            nonlocal lease_id
            lease_id = self.engine.stores.prepare(key, tokens, 0, ENGINE_ID).lease_id

        took_s = self.time_call(prepare)
        if not lease_id:
            return took_s
        complete = self.time_call(
            lambda: self.engine.stores.complete(lease_id, ENGINE_ID, success=True)
        )
        return max(took_s, complete)
