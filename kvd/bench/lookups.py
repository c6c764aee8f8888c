"""What the pure engine's calls cost as more sessions are stored: no process, no RPC, no I/O.

Every engine holds its sessions on SSD and has room for few in DRAM. Loaded are random ones, so that
each load finds a session that has been idle, promotes its blocks, and evicts another's. Stored are
new ones, dropped again between the rounds. Python's garbage collector is held off while timing: its
full passes would charge one engine for the objects of all. (The RPC figures contain it.)
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvd.bench.memory_performer import MemoryPerformer
from kvd.bench.options import BLOCKS_PER_SESSION, SMALL_LAYOUT, BenchOptions
from kvd.bench.population import (
    SALT,
    TOKENS_PER_SESSION,
    block_keys_of,
    block_tokens_of,
    idle_key,
    population,
)
from kvd.bench.rounds import Rounds
from kvd.bench.sessions import bench_key, token_ids_of
from kvd.core.engine import CacheEngine
from kvd.core.records.records import Lookup
from kvd.core.state.limits import Limits
from shared.children.child_process import ChildFailedError

T = TypeVar("T")

OPERATIONS = ("prepare_load", "complete_load", "prepare_store", "complete_store")
OWNER = 1
SLOTS_IN_SESSIONS = 64
SPARE_SESSIONS = 10_000  # room on SSD for those that are stored meanwhile
NEW_SEED = 1 << 24  # token ids of new sessions: not those of an idle one


def measure_lookups(options: BenchOptions) -> Rounds:
    """Take turns between engines of all sizes."""
    scale = options.scale
    engines = [TimedEngine(num_sessions) for num_sessions in scale.session_counts]
    rounds = Rounds("core")
    for engine in engines:
        engine.take(OPERATIONS, scale.calls_per_round, Rounds("core"))  # to warm up
    with _uncollected():
        for _ in range(scale.rounds):
            for engine in engines:
                engine.take(OPERATIONS, scale.calls_per_round, rounds)
    return rounds


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class TimedEngine:
    """An engine with `num_sessions` idle sessions, and its in-memory world."""

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
        """Do one turn."""
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
            lambda: self.engine.loads.prepare(idle_key(number), request, 0, OWNER),
        )
        self._performer.settle(token_ids)
        if answer.lookup is Lookup.PENDING:
            answer = self.engine.loads.settle(answer.lease_id)
        if answer.end_token != TOKENS_PER_SESSION:
            raise ChildFailedError(
                f"session {number} is not found ({answer.miss_reason})", "report it as a bug"
            )
        _timed(
            turn["complete_load"],
            lambda: self.engine.loads.complete(answer.lease_id, OWNER),
        )
        self._performer.settle({})

    def _store(self, turn: dict[str, list[float]]) -> str:
        self._num_new += 1
        name = f"new-{self._num_new}"
        request = token_ids_of(NEW_SEED + self._num_new, TOKENS_PER_SESSION)
        self._tick()
        answer = _timed(
            turn["prepare_store"],
            lambda: self.engine.stores.prepare(bench_key(name), request, 0, OWNER),
        )
        self._performer.settle({})
        _timed(
            turn["complete_store"],
            lambda: self.engine.stores.complete(answer.lease_id, OWNER, success=True),
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
