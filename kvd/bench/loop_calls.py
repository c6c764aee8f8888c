"""The longest calls of the event loop over very many idle sessions: each stops every engine.

The pure engine is started from a real index, and what a kvd's loop would call is called: every
call with the actions that come of it drained, but not carried out. Processor time of this thread is
measured, so that a busy machine costs no more. The garbage collector does not look at restored
sessions, nor again at what it looked at for long, as in a kvd.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvd.bench.figures import LoopCalls
from kvd.bench.filled_index import (
    MANIFEST_NAME,
    SALT,
    TOKENS_PER_SESSION,
    FilledIndexes,
    bench_key,
    token_ids_of,
)
from kvd.bench.lookups import MemoryPerformer
from kvd.bench.options import SMALL_LAYOUT, BenchOptions
from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import POLICIES
from kvd.core.state.limits import Limits, TenantLimits
from kvd.tiers.faults import NoFaults
from kvd.tiers.manifest import Manifest
from shared.process import memory
from shared.types.units import NS_PER_S

POLICY = "predictive"  # the default one
OWNER = 1
NUM_SLOTS = 512
NUM_STORES = 100  # of new sessions where the SSD tier is full
TICKS_SHARE = 500  # one call for so many sessions, until a reload is brought about
NUM_TICKS = 200  # at most, of those that expire sessions
TTL_NS = 3600 * NS_PER_S
NOW_NS = 1 << 40
NEW_SEED = 1 << 27


def measure_loop_calls(options: BenchOptions, indexes: FilledIndexes, state_dir: Path) -> LoopCalls:
    """Start the engine over an index, and make its calls."""
    num_sessions = max(options.scale.session_counts)
    options.on_progress(f"the loop's longest calls, {num_sessions} sessions")
    with memory.sparing_survivors():
        return _measured(opened(options, indexes, state_dir), num_sessions, indexes)


def _measured(run: "LoopRun", num_sessions: int, indexes: FilledIndexes) -> LoopCalls:
    attach_s = run.longest(lambda: run.engine.add_slots(NUM_SLOTS, 1))
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


def opened(options: BenchOptions, indexes: FilledIndexes, state_dir: Path) -> "LoopRun":
    """Start an engine over an index whose sessions fill the SSD tier."""
    num_sessions = max(options.scale.session_counts)
    limits = Limits(
        num_slots=0,
        num_extents=num_sessions * indexes.blocks_per_session,
        max_sessions=num_sessions,
        default_ttl_ns=NOW_NS + TTL_NS,  # they were used when the clock began
        prefetch_bytes=32 << 20,
        watermark=0.02,
    )
    with memory.building_up():
        return LoopRun(limits, state_dir)


class LoopRun:
    """An engine over an index, and its clock."""

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

    def longest(self, call: Callable[[], object]) -> float:
        """Make a call, carry out what comes of it, and say how long the call itself took."""
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
        """Let time pass, so many times; returns how long the longest of these calls took."""
        longest_s = 0.0
        for _ in range(num_ticks):
            self.now_ns += step_ns
            longest_s = max(longest_s, self.longest(self.engine.expire))
        return longest_s

    def give_quota(self, num_blocks: int) -> float:
        """Give the tenant with all the sessions its first quota; returns how long that took."""
        quota = TenantLimits(quota_bytes=num_blocks * SMALL_LAYOUT.block_bytes)
        self._limits = replace(self._limits, tenant_limits=lambda _tenant: quota)
        return self.longest(lambda: self.engine.set_limits(self._limits))

    def store(self, number: int) -> float:
        """Store a new session, for which the coldest one has to go."""
        self.now_ns += 1
        key, tokens = (
            bench_key(f"longest-{number}"),
            token_ids_of(NEW_SEED + number, TOKENS_PER_SESSION),
        )
        lease_id = 0

        def prepare() -> None:
            nonlocal lease_id
            lease_id = self.engine.stores.prepare(key, tokens, 0, OWNER).lease_id

        took_s = self.longest(prepare)
        if not lease_id:
            return took_s
        complete = self.longest(lambda: self.engine.stores.complete(lease_id, OWNER, success=True))
        return max(took_s, complete)
