"""Whatever schedulers do and connections suffer, kvd's queue is the one last reported.

Several engines take random steps, and report to one queue window in between, over connections
that break before or after an update arrives, to a kvd that may lose the queue. After each
acknowledged update the window has the scheduler's queue, up to the length that kvd accepts.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from kvd.core.eviction.queue_window import QueueWindow
from kvd.rpc.queue_replica import QueueReplica, queue_update
from shared.kvd_client.queue_sender import snapshot_message
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.queue_delta import QueueUpdate
from tests.property.scheduler_world import KEYS, SchedulerWorld
from tests.property.test_scheduler import go_round, random_limits

MODEL = KEYS[0].model


class TellingEngine:
    """An engine whose scheduler takes steps, and its end of the connection to kvd."""

    def __init__(self, engine_id: int, window: QueueWindow, random: Random) -> None:
        self.engine_id = engine_id
        self.random = random
        self.most_requests = random.choice([1, 3, 8, 1000])
        limits = random_limits(random)
        self.world = SchedulerWorld(replace(limits, max_waiting=random.choice([8, 40])))
        self.window = window
        self.replica = QueueReplica(self._apply)
        self.now_ns = 0
        self.is_forgotten = False  # by kvd, as the answer to the next update will show

    def go_round(self) -> None:
        random, world = self.random, self.world
        if random.random() < 0.4:
            world.arrive(random.choice(KEYS), random.choice([0, 0, 1]))
        for number, (key, rank) in list(world.arriving.items()):
            luck = random.random()
            if luck < 0.3:
                world.submit(key, random.randint(1, 12), 4, priority=-rank[0], number=number)
            if luck < 0.4:
                world.withdraw(number)
        for _ in range(random.choice([0, 1, 1, 6])):
            world.submit(
                random.choice(KEYS),
                random.randint(1, 12),
                random.randint(1, 12),
                priority=random.choice([0, 0, 0, 1, 2]),
            )
        go_round(world, random, Counter())

    def report(self, seen: Counter[str]) -> None:
        """Send an update over a connection that may break."""
        feed = self.world.scheduler.feed
        feed.interval_s = self.random.choice([0.0, 0.1, 0.2])
        update = feed.next_update(self.most_requests)
        if update is None:
            seen["nothing"] += 1
            if not self.is_forgotten:
                self.check()
            return
        sent = snapshot_message(self.engine_id, update).SerializeToString()
        luck = self.random.random()
        if luck < 0.05:
            seen["lost"] += 1
            self.reconnect()
            return
        received = kvd_pb2.QueueSnapshot.FromString(sent)
        is_known = self.replica.apply_update(queue_update(received, MODEL, self.most_requests))
        if luck < 0.1:
            seen["acknowledgement lost"] += 1
            self.reconnect()
            return
        feed.on_acknowledge(update.sequence, send_full=not is_known)
        if is_known:
            seen["changes" if update.base_sequence else "full"] += 1
            self.is_forgotten = False
            self.check()
        else:
            seen["asked for all"] += 1

    def reconnect(self) -> None:
        """End the stream, and with it the queue that kvd knows."""
        self.window.forget(self.engine_id)
        self.replica = QueueReplica(self._apply)
        self.world.scheduler.feed.restart()

    def check(self) -> None:
        """Check that kvd has the head of the scheduler's queue."""
        engine = self.window._engines.get(self.engine_id)
        known = []
        if engine is not None:
            known = [(number, None) for number in sorted(engine.running)]
            known += [(rank[2], rank) for rank in engine.order]
            keys = engine.running | {n: place[3] for n, place in engine.places.items()}
            for number, key in keys.items():
                known_key, _ = self.world.arriving.get(number, (None, None))
                assert (known_key or self.world.turns[number].request.key) == key
        assert known == self.world.queue()[: self.most_requests]

    def _apply(self, update: QueueUpdate) -> int:
        self.now_ns += 50_000_000
        take = self.window.change if update.base_sequence else self.window.replace
        return take(self.engine_id, update.change, self.now_ns)


def exchange(seed: int, num_rounds: int) -> Counter[str]:
    """Run engines that take steps and report now and then; return the counts of what happened."""
    random, seen = Random(seed), Counter[str]()  # noqa: S311  # test data
    window = QueueWindow(lambda _keys, _unqueued: None)
    engines = [
        TellingEngine(engine_id, window, random) for engine_id in range(random.randint(1, 3))
    ]
    for _ in range(num_rounds):
        engine = random.choice(engines)
        engine.go_round()
        if random.random() < 0.7:
            engine.report(seen)
        if random.random() < 0.02:
            engine.is_forgotten = True
            window.forget(engine.engine_id)
        window.check()
    for engine in engines:
        for number in list(engine.world.arriving):
            engine.world.withdraw(number)
        engine.world.drain()
        engine.reconnect()
        while engine.replica._known_sequence == 0:
            engine.report(seen)
    window.check()
    assert len(window) == 0
    return seen


def check_exchanges(seeds: range, num_rounds: int) -> None:
    seen = sum((exchange(seed, num_rounds) for seed in seeds), Counter[str]())
    wanted = ("lost", "acknowledgement lost", "nothing", "changes", "full", "asked for all")
    assert min(seen[what] for what in wanted) > 0, f"the connections are too good: {seen}"


def test_kvd_has_the_queue_that_was_reported_last() -> None:
    """For a few random histories."""
    check_exchanges(range(4), 120)


@pytest.mark.long
def test_kvd_has_the_queue_that_was_reported_last_at_length() -> None:
    """For many and longer histories."""
    check_exchanges(range(1000, 1300), 500)
