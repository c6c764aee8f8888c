"""The queues of all engines in one order."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

from kvd.core.eviction.queue_window import QueueWindow
from shared.types.queue_delta import (
    QueueChange,
    QueuedRequest,
    RunningRequest,
    combined,
    running_digest,
    waiting_digest,
)
from shared.types.session_key import SessionKey

MS = 1_000_000


def key_of(name) -> SessionKey:
    return SessionKey("t", "0f", str(name))


def job(number: int, name=None, tag: float = 0.0, priority: int = 0) -> QueuedRequest:
    return QueuedRequest((-priority, tag, number), key_of(number if name is None else name))


class Window:
    """A queue window that is checked after each call, and notes whom it has told of."""

    def __init__(self) -> None:
        self.told: Counter[str] = Counter()
        self.queue = QueueWindow(self._changed)

    def _changed(self, keys: Collection[SessionKey]) -> None:
        self.queue.check()  # it is told after the whole change
        self.told.update(key.session_id for key in keys)

    def replace(self, owner: int, *jobs: QueuedRequest, running=(), now_ns=0, interval_ns=0) -> int:
        self.told.clear()
        change = QueueChange(jobs, running, (), interval_ns)
        digest = self.queue.replace(owner, change, now_ns)
        self.queue.check()
        return digest

    def change(self, owner: int, *jobs: QueuedRequest, running=(), left=(), now_ns=0) -> int:
        self.told.clear()
        digest = self.queue.change(owner, QueueChange(jobs, running, left), now_ns)
        self.queue.check()
        return digest

    def names(self) -> list[str]:
        return [key.session_id for key in self.queue]


def test_a_queue_is_in_the_order_of_its_ranks():
    """Higher priorities first, then lower tags, then lower numbers, however they are told."""
    window = Window()
    window.replace(1, job(3), job(1, tag=5.0), job(2), job(4, priority=1))
    assert window.names() == ["4", "2", "3", "1"]
    assert len(window.queue) == window.queue.num_waiting(1) == 4


def test_changes_join_move_start_and_leave():
    """Each job is where its newest change has put it."""
    window = Window()
    window.replace(1, *map(job, range(5)))
    window.change(
        1, job(9, tag=-0.0), job(4, priority=2), running=[RunningRequest(0, key_of(0))], left=[2]
    )
    assert window.names() == ["4", "1", "3", "9"]
    assert window.queue.is_running(key_of(0))
    assert not window.queue.is_queued(key_of(0))
    assert [n for n in range(10) if window.queue.knows(1, n)] == [0, 1, 3, 4, 9]
    assert not window.queue.knows(2, 1)
    assert window.queue.num_running(1) == 1
    assert set(window.told) == {"9", "4", "0", "2"}
    window.change(1, job(0))
    assert window.names() == ["4", "0", "1", "3", "9"]
    assert not window.queue.is_running(key_of(0))


def test_changes_of_what_is_not_known_are_harmless():
    """A job that leaves without having come; one that comes twice."""
    window = Window()
    window.replace(1, job(1))
    window.change(1, left=[7])
    window.change(1, job(1, tag=3.0))
    window.change(2, left=[1])
    assert window.names() == ["1"]


def test_the_digest_is_the_sum_over_the_jobs():
    """The same by whatever way they came."""
    whole, steps = Window(), Window()
    running = [RunningRequest(77, key_of("r"))]
    digest = whole.replace(1, *map(job, range(20)), running=running)
    steps.replace(1, *map(job, range(0, 30, 3)))
    steps.change(1, *map(job, range(20)), left=range(20, 30))
    assert steps.change(1, running=running) == digest
    parts = [waiting_digest(job(n).rank, key_of(n)) for n in range(20)]
    assert digest == combined(running_digest(77, key_of("r")), added=sum(parts))
    assert whole.replace(1) == 0


def test_a_queue_that_is_told_again_is_not_news():
    """Only sessions whose jobs are others are told of, and the others keep their place."""
    window = Window()
    window.replace(1, *map(job, range(100)), interval_ns=MS)
    place = window.queue.place(key_of(50))
    window.replace(1, *map(job, range(2, 101)), now_ns=5, interval_ns=MS)
    assert set(window.told) == {"0", "1", "100"}
    assert window.queue.place(key_of(50)) == place
    window.replace(1, *map(job, range(80, 200)), now_ns=5, interval_ns=MS)
    assert window.names() == [str(n) for n in range(80, 200)]


def test_a_number_that_is_another_sessions_now_is_a_change():
    """Whether it waits or runs."""
    window = Window()
    window.replace(1, *map(job, range(9)), running=[RunningRequest(10, key_of("x"))])
    window.replace(
        1, job(0, "other"), *map(job, range(1, 9)), running=[RunningRequest(10, key_of("y"))]
    )
    assert window.names()[0] == "other"
    assert window.queue.is_running(key_of("y"))
    assert not window.queue.is_running(key_of("x"))


@pytest.mark.parametrize("how", ["forgotten", "replaced by nothing"])
def test_an_engine_goes_with_its_jobs(how):
    """Those of others stay, also of a session that both have."""
    window = Window()
    window.replace(1, *map(job, range(10)), running=[RunningRequest(20, key_of("both"))])
    window.replace(2, job(1, "both"), running=[RunningRequest(2, key_of("both"))])
    window.told.clear()
    if how == "forgotten":
        window.queue.forget(1)
        window.queue.forget(77)
    else:
        window.replace(1)
    window.queue.check()
    assert window.names() == ["both"]
    assert window.queue.is_running(key_of("both"))
    assert set(window.told) == {*map(str, range(10)), "both"}
    assert window.queue.num_waiting(1) == window.queue.num_running(1) == 0
    assert 1 not in window.queue._engines


def test_a_small_engine_goes_without_looking_at_all_jobs():
    """Its jobs are taken out one by one."""
    window = Window()
    window.replace(1, *map(job, range(200)), interval_ns=MS)
    window.replace(2, job(7, "small"), interval_ns=10 * MS)
    window.queue.forget(2)
    window.queue.check()
    assert window.names() == [str(n) for n in range(200)]


def test_engines_are_merged_by_estimated_start():
    """One that starts a job every two milliseconds is passed by one that does every one."""
    window = Window()
    window.replace(1, *(job(n, f"a{n}") for n in range(4)), interval_ns=2 * MS)
    window.replace(2, *(job(n, f"b{n}") for n in range(4)), interval_ns=1 * MS)
    assert window.names() == ["b0", "a0", "b1", "b2", "a1", "b3", "a2", "a3"]
    place = window.queue.place(key_of("a1"))
    assert window.queue.num_ahead(place) == 4
    assert window.queue.starts_in_ns(place) == 4 * MS
    assert list(window.queue)[:2] == [key_of("b0"), key_of("a0")]


def test_a_job_that_comes_late_keeps_its_engines_order():
    """Its estimate lies between those of its neighbours, which were made before."""
    window = Window()
    window.replace(1, *(job(n, tag=float(n)) for n in range(4)), interval_ns=MS)
    window.change(1, job(9, tag=1.5), now_ns=100 * MS)
    window.change(1, job(10, tag=9.0), now_ns=100 * MS)
    assert window.names() == ["0", "1", "9", "2", "3", "10"]


def test_a_session_stands_where_its_first_turn_does():
    """It is queued while any of its turns waits, and runs while any runs, at any engine."""
    window = Window()
    window.replace(1, job(1, "s"), job(2), job(3, "s"))
    window.replace(2, running=[RunningRequest(1, key_of("s"))])
    assert window.queue.place(key_of("s")).rank[2] == 1
    window.change(1, left=[1])
    assert window.queue.place(key_of("s")).rank[2] == 3
    window.change(1, left=[3])
    assert window.queue.place(key_of("s")) is None
    assert window.queue.is_running(key_of("s"))


def test_many_turns_of_one_session_cost_no_more_than_those_of_many():
    """Nobody who waits with one session for ten thousand turns holds up the others."""
    window = QueueWindow(lambda _: None)
    jobs = QueueChange([job(n, "same") for n in range(10_000)])
    window.replace(1, jobs, 0)
    window.change(1, replace(jobs, waiting=(), left=range(0, 10_000, 2)), 0)
    assert len(window) == 5000
    window.check()
