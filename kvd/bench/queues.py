"""What an engine's queue costs kvd: told whole, and one change of it. No process, no RPC.

A message is parsed, decoded, checked and taken by the pure engine with its default policy, as the
service does it; nothing is stored of the sessions that wait. Python's garbage collector is held
off while timing, as in lookups.py.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvd.bench.figures import QueueCosts
from kvd.bench.options import BLOCKS_PER_SESSION, MODEL, SMALL_LAYOUT, BenchOptions
from kvd.bench.population import SALT
from kvd.bench.sessions import bench_key
from kvd.config import EvictionSettings
from kvd.core.engine import CacheEngine, Limits
from kvd.core.eviction.registry import POLICIES
from kvd.rpc.told_queue import ToldQueue
from kvd.wire.queue_messages import queue_update
from shared.kvd_client.queue_feed import QueueFeed
from shared.kvd_client.queue_message import snapshot_message
from shared.measuring.statistics import spread
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.queue_change import QueueUpdate

OWNER = 1
INTERVAL_S = 0.1  # between two starts


def measure_queues(options: BenchOptions) -> QueueCosts:
    """Tell a queue whole, then change by change, so many times."""
    policy, num_jobs = EvictionSettings().policy, options.scale.queue_jobs
    full_s, change_s = [], []
    for _ in range(options.scale.rounds):
        telling = _Telling(num_jobs, policy)
        with _uncollected():
            full_s.append(telling.tell())
            for number in range(options.scale.calls_per_round):
                telling.change(number)
                change_s.append(telling.tell())
    return QueueCosts(num_jobs, policy, spread(full_s), spread(change_s))


class _Telling:
    """A scheduler with a queue, and a cache engine that is told of it."""

    def __init__(self, num_jobs: int, policy: str) -> None:
        self._num_jobs = num_jobs
        self._feed = QueueFeed()
        self._feed.interval_s = INTERVAL_S
        for number in range(num_jobs):
            self._add(number, float(number))
        limits = Limits(num_slots=BLOCKS_PER_SESSION, num_extents=0)
        self._engine = CacheEngine(SMALL_LAYOUT, limits, lambda _tenant: SALT, POLICIES[policy])
        self._told = ToldQueue(self._apply)

    def change(self, number: int) -> None:
        """Let a job leave, and another join somewhere."""
        self._feed.left(number)
        self._add(self._num_jobs + number, number * 0.618 % 1 * self._num_jobs)

    def tell(self) -> float:
        """Tell what has changed; return the seconds that kvd takes for it."""
        update = self._feed.next_update(self._num_jobs)
        assert update is not None, "something has changed"  # noqa: S101
        sent = snapshot_message(OWNER, update).SerializeToString()
        started = time.perf_counter()
        received = kvd_pb2.QueueSnapshot.FromString(sent)
        is_known = self._told.take(queue_update(received, MODEL, self._num_jobs))
        seconds = time.perf_counter() - started
        self._feed.acknowledged(update.sequence, send_full=not is_known)
        return seconds

    def _add(self, number: int, tag: float) -> None:
        self._feed.waits((0, tag, number), bench_key(f"queued-{number}"), 1000)

    def _apply(self, update: QueueUpdate) -> int:
        take = self._engine.change_queue if update.base_sequence else self._engine.replace_queue
        return take(OWNER, update.change, 1)


@contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
