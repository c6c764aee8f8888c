"""The cost of the pure engine's calls as more sessions are stored: no process, no RPC, no I/O.

Each engine has its sessions on SSD, and room for few of them in DRAM. Loads are of random sessions,
so that each load finds an idle session, promotes its blocks, and evicts another session's. Stores
are of new sessions, which are dropped between the rounds. The engine's I/O is done in memory, at
once.

An engine's queue is reported as a whole, and then change by change. A message is parsed, decoded,
checked and applied by the pure engine with its default policy, as in the service. Nothing is stored
of the sessions in the queue.

Python's garbage collector is off while anything is timed: its full passes would charge one engine
for the objects of all. (The RPC figures include it.)
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kvd.bench.figures import QueueCosts, Rounds
from kvd.bench.filled_index import (
    SALT,
    TOKENS_PER_SESSION,
    bench_key,
    block_keys_of,
    block_tokens_of,
    idle_key,
    population,
    token_ids_of,
)
from kvd.bench.options import BLOCKS_PER_SESSION, MODEL, SMALL_LAYOUT, BenchOptions
from kvd.config import EvictionSettings
from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import POLICIES
from kvd.core.records.actions import (
    Action,
    CommitIndex,
    CompactTokens,
    DropBlock,
    HashSlots,
    IoOutcome,
    ReadBlock,
    VerifyExtent,
    VerifySlot,
    WriteBlock,
)
from kvd.core.records.entries import StoredBlock
from kvd.core.records.extent_shape import CHECKSUM_BYTES
from kvd.core.state.limits import Limits
from kvd.rpc.queue_replica import QueueReplica, queue_update
from shared.children.child_process import ChildFailedError
from shared.kvd_client.queue_sender import snapshot_message
from shared.measuring.statistics import spread
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.granted_slots import Lookup
from shared.types.queue_delta import QueueUpdate
from shared.types.queue_feed import QueueFeed


class MemoryPerformer:
    """Performs the actions of one engine in memory."""

    def __init__(self, engine: CacheEngine) -> None:
        self._engine = engine
        self._checksums = bytes(CHECKSUM_BYTES * len(engine.layout.layers))

    def settle(self, token_ids: Mapping[bytes, bytes]) -> None:
        """Perform actions until the engine has no more.

        Args:
            token_ids: token ids of the blocks that may be read, by block key.
        """
        while actions := self._engine.drain():
            self.perform(actions, token_ids)

    def perform(self, actions: Sequence[Action], token_ids: Mapping[bytes, bytes]) -> None:
        """Perform drained actions; their completions may lead to new actions."""
        for action in actions:
            self._perform(action, token_ids)

    def _perform(self, action: Action, token_ids: Mapping[bytes, bytes]) -> None:
        engine = self._engine
        match action:
            case ReadBlock():
                stored = StoredBlock(token_ids[action.key], self._checksums)
                engine.arrivals.read_done(action.op_id, IoOutcome.OK, stored)
            case VerifySlot() | VerifyExtent():
                engine.arrivals.verify_done(action.op_id, IoOutcome.OK)
            case HashSlots():
                engine.hashes.hash_done(action.op_id, [self._checksums] * len(action.slots))
            case WriteBlock():
                engine.writes.write_done(action.op_id, IoOutcome.OK)
            case CompactTokens():
                checksums = [self._checksums] * len(action.blocks)
                engine.compactions.copy_done(action.op_id, IoOutcome.OK, checksums)
            case CommitIndex():
                engine.compactions.commit_done(action.op_id)
            case DropBlock():
                engine.writes.drop_done(action.op_id)
            case _:
                pass


T = TypeVar("T")

OPERATIONS = ("prepare_load", "complete_load", "prepare_store", "complete_store")
ENGINE_ID = 1
SLOTS_IN_SESSIONS = 64
SPARE_SESSIONS = 10_000  # room on SSD for sessions that are stored meanwhile
NEW_SEED = 1 << 24  # of new sessions' token ids; above the seeds of idle sessions


def measure_lookups(options: BenchOptions) -> Rounds:
    """Measure engines with all numbers of sessions, in turns."""
    scale = options.scale
    engines = [TimedEngine(num_sessions) for num_sessions in scale.session_counts]
    rounds = Rounds("core")
    for engine in engines:
        engine.take(OPERATIONS, scale.calls_per_round, Rounds("core"))  # to warm up
    with uncollected():
        for _ in range(scale.rounds):
            for engine in engines:
                engine.take(OPERATIONS, scale.calls_per_round, rounds)
    return rounds


@contextmanager
def uncollected() -> Iterator[None]:
    """Turn the garbage collector off for the block inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TimedEngine:
    """An engine with `num_sessions` idle sessions, whose I/O is done in memory."""

    def __init__(self, num_sessions: int) -> None:
        self._num_sessions = num_sessions
        self._now_ns = 1 << 40
        self._random = random.Random(num_sessions)  # noqa: S311 - which session comes next
        self._num_new = 0
        limits = Limits(
            num_slots=SLOTS_IN_SESSIONS * BLOCKS_PER_SESSION,
            num_extents=(num_sessions + SPARE_SESSIONS) * BLOCKS_PER_SESSION,
            max_sessions=num_sessions + SPARE_SESSIONS,
        )
        self.engine = CacheEngine(SMALL_LAYOUT, limits, lambda _tenant: SALT)
        self.engine.advance(self._now_ns)
        self.engine.restore(population(num_sessions), (), (), 1)
        self._performer = MemoryPerformer(self.engine)
        self._performer.settle({})

    def take(self, operations: tuple[str, ...], num_calls: int, rounds: Rounds) -> None:
        """Measure one engine's turn of a round."""
        turn = rounds.begin(operations, self._num_sessions)
        stored = []
        for _ in range(num_calls):
            self._load(turn)
            stored.append(self._store(turn))
        for name in stored:
            self._tick()
            self.engine.sessions.flush(bench_key(name), dry_run=False)
            self._performer.settle({})

    def _load(self, turn: dict[str, list[float]]) -> None:
        number = self._random.randrange(self._num_sessions)
        token_ids = dict(zip(block_keys_of(number), block_tokens_of(number), strict=True))
        request = token_ids_of(number, TOKENS_PER_SESSION)
        self._tick()
        answer = _timed(
            turn["prepare_load"],
            lambda: self.engine.loads.prepare(idle_key(number), request, 0, ENGINE_ID),
        )
        self._performer.settle(token_ids)
        if answer.lookup is Lookup.PENDING:
            answer = self.engine.loads.settle(answer.lease_id)
        if answer.end_token != TOKENS_PER_SESSION:
            raise ChildFailedError(
                f"session {number} was not found ({answer.miss_reason})", "this is a bug: report it"
            )
        _timed(
            turn["complete_load"],
            lambda: self.engine.loads.complete(answer.lease_id, ENGINE_ID),
        )
        self._performer.settle({})

    def _store(self, turn: dict[str, list[float]]) -> str:
        self._num_new += 1
        name = f"new-{self._num_new}"
        request = token_ids_of(NEW_SEED + self._num_new, TOKENS_PER_SESSION)
        self._tick()
        answer = _timed(
            turn["prepare_store"],
            lambda: self.engine.stores.prepare(bench_key(name), request, 0, ENGINE_ID),
        )
        self._performer.settle({})
        _timed(
            turn["complete_store"],
            lambda: self.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True),
        )
        self._performer.settle({})
        return name

    def _tick(self) -> None:
        self._now_ns += 1_000_000
        self.engine.advance(self._now_ns)


def _timed(seconds: list[float], call: Callable[[], T]) -> T:
    started = time.perf_counter()
    answer = call()
    seconds.append(time.perf_counter() - started)
    return answer


INTERVAL_S = 0.1  # between two starts


def measure_queues(options: BenchOptions) -> QueueCosts:
    """Measure reports of a whole queue, and of single changes, in each round."""
    policy, num_jobs = EvictionSettings().policy, options.scale.queue_jobs
    full_s, change_s = [], []
    for _ in range(options.scale.rounds):
        reports = _QueueReports(num_jobs, policy)
        with uncollected():
            full_s.append(reports.report())
            for number in range(options.scale.calls_per_round):
                reports.change(number)
                change_s.append(reports.report())
    return QueueCosts(num_jobs, policy, spread(full_s), spread(change_s))


class _QueueReports:
    """A scheduler with a queue, and a cache engine that gets its reports."""

    def __init__(self, num_jobs: int, policy: str) -> None:
        self._num_jobs = num_jobs
        self._feed = QueueFeed()
        self._feed.interval_s = INTERVAL_S
        for number in range(num_jobs):
            self._add(number, float(number))
        limits = Limits(num_slots=BLOCKS_PER_SESSION, num_extents=0)
        self._engine = CacheEngine(SMALL_LAYOUT, limits, lambda _tenant: SALT, POLICIES[policy])
        self._replica = QueueReplica(self._apply)

    def change(self, number: int) -> None:
        """Let a request leave, and another join somewhere."""
        self._feed.on_leave(number)
        self._add(self._num_jobs + number, number * 0.618 % 1 * self._num_jobs)

    def report(self) -> float:
        """Report the changes; return kvd's processor time for the report, in seconds."""
        update = self._feed.next_update(self._num_jobs)
        assert update is not None, "something has changed"  # noqa: S101
        sent = snapshot_message(ENGINE_ID, update).SerializeToString()
        started = time.thread_time()
        received = kvd_pb2.QueueSnapshot.FromString(sent)
        is_known = self._replica.apply_update(queue_update(received, MODEL, self._num_jobs))
        seconds = time.thread_time() - started
        self._feed.on_acknowledge(update.sequence, send_full=not is_known)
        return seconds

    def _add(self, number: int, tag: float) -> None:
        self._feed.on_wait((0, tag, number), bench_key(f"queued-{number}"), 1000)

    def _apply(self, update: QueueUpdate) -> int:
        engines = self._engine.engines
        take = engines.change_queue if update.base_sequence else engines.replace_queue
        return take(ENGINE_ID, update.change)
