"""The pool: which job runs first, and which waits. Threads are held by events, never by time."""

import mmap
import threading
import weakref

import pytest

from kvd.tiers.direct_io import Staging
from kvd.tiers.io_threads import IoPool, Priority

WAIT_S = 30


class Gate:
    """A job that signals its start, and runs until it is released."""

    def __init__(self):
        self.entered, self.proceed = threading.Event(), threading.Event()

    def __call__(self, _staging):
        self.entered.set()
        assert self.proceed.wait(WAIT_S)


@pytest.fixture
def make():
    made = []

    def pool(num_threads, max_bytes=1 << 30):
        made.append(IoPool(num_threads, max_bytes))
        made[-1].start()
        return made[-1]

    yield pool
    for each in made:
        each.close()


class Order:
    """Jobs that record their names."""

    def __init__(self):
        self.names, self.done = [], threading.Semaphore(0)

    def job(self, name):
        def run(_staging):
            self.names.append(name)
            self.done.release()

        return run

    def wait(self, count):
        for _ in range(count):
            assert self.done.acquire(timeout=WAIT_S)
        return self.names


def _occupy(pool, count, priority=Priority.READ, num_bytes=0):
    gates = [Gate() for _ in range(count)]
    for gate in gates:
        pool.submit(priority, num_bytes, gate)
        assert gate.entered.wait(WAIT_S)
    return gates


def _num_held_up(pool):
    """Count waiting jobs that cannot start before another ends."""
    with pool._changed:
        assert pool._startable_job() is None
        return len(pool)


def _release(gates):
    for gate in gates:
        gate.proceed.set()


def test_jobs_run_by_priority(make):
    """In any order of submission: loads, urgent verifications, reads ahead, writes and so on."""
    pool, order = make(1), Order()
    gates = _occupy(pool, 1)
    for priority in reversed(Priority):
        pool.submit(priority, 0, order.job(priority))
    assert _num_held_up(pool) == len(Priority)
    _release(gates)
    assert order.wait(len(Priority)) == list(Priority)


def test_a_load_does_not_wait_for_reads_ahead(make):
    """They leave half of the threads and of the bytes to loads, and to writes."""
    pool, order = make(2, 100), Order()
    gates = _occupy(pool, 1, Priority.READ_AHEAD, 50)
    pool.submit(Priority.READ_AHEAD, 0, order.job("ahead"))
    pool.submit(Priority.READ, 50, order.job("load"))
    assert order.wait(1) == ["load"]
    pool.submit(Priority.WRITE, 0, order.job("write"))
    assert order.wait(1) == ["load", "write"]
    assert _num_held_up(pool) == 1
    _release(gates)
    assert order.wait(1) == ["load", "write", "ahead"]


def test_no_read_ahead_starts_while_a_load_reads(make):
    """It has the disk for itself, except for earlier reads."""
    pool, order = make(4, 100), Order()
    gates = _occupy(pool, 1, Priority.READ, 10)
    pool.submit(Priority.READ_AHEAD, 10, order.job("ahead"))
    pool.submit(Priority.WRITE, 10, order.job("write"))
    assert order.wait(1) == ["write"]
    assert _num_held_up(pool) == 1
    _release(gates)
    assert order.wait(1) == ["write", "ahead"]


def test_reads_ahead_use_a_single_thread_one_by_one(make):
    """Half of one thread is one; a write waits for it, a load does not."""
    pool, order = make(1, 100), Order()
    gates = _occupy(pool, 1, Priority.READ_AHEAD, 10)
    pool.submit(Priority.WRITE, 10, order.job("write"))
    pool.submit(Priority.READ_AHEAD, 10, order.job("ahead"))
    pool.submit(Priority.READ, 10, order.job("load"))
    assert order.wait(1) == ["load"]
    assert _num_held_up(pool) == 2
    _release(gates)
    assert order.wait(2) == ["load", "ahead", "write"]


def test_layered_reads_run_group_by_group(make):
    """The first layers of all blocks of a load come first.

    An earlier load goes first as a whole.
    """
    pool, order = make(1), Order()
    gates = _occupy(pool, 1)
    keys = [(load, group, block) for load in (2, 1) for block in (4, 3) for group in (1, 0)]
    for key in keys:
        pool.submit(Priority.READ, 0, order.job(key), key)
    _release(gates)
    assert order.wait(8) == sorted(keys)


def test_later_tickets_are_larger(make):
    """From whichever layout: loads of several layouts are ordered by them."""
    pool = make(1)
    tickets = [pool.ticket() for _ in range(3)]
    assert tickets == sorted(set(tickets))


def test_a_waiting_thread_keeps_no_job_alive(make):
    """A job references memory of an arena, which may be given up once the job has run."""
    pool, order, freed = make(1), Order(), threading.Event()
    job = order.job("a")
    weakref.finalize(job, freed.set)
    pool.submit(Priority.WRITE, 0, job)
    del job
    order.wait(1)
    assert freed.wait(WAIT_S)


def test_equal_jobs_run_in_order_of_arrival(make):
    """First come, first served."""
    pool, order = make(1), Order()
    gates = _occupy(pool, 1)
    for name in range(5):
        pool.submit(Priority.WRITE, 0, order.job(name))
    _release(gates)
    assert order.wait(5) == list(range(5))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("patient", [Priority.WRITE, Priority.BACKGROUND])
def test_a_read_does_not_wait_for_writes(make, num_threads, patient):
    """With all threads writing a read runs at once; more writes than threads never run."""
    pool, order = make(num_threads), Order()
    gates = _occupy(pool, num_threads, patient)
    pool.submit(patient, 0, order.job("patient"))
    pool.submit(Priority.READ, 0, order.job("read"))
    assert order.wait(1) == ["read"]
    assert _num_held_up(pool) == 1
    _release(gates)
    assert order.wait(1) == ["read", "patient"]


def test_reads_alone_use_the_threads_configured(make):
    """The extra thread is used while writes run only."""
    pool, order = make(2), Order()
    gates = _occupy(pool, 2)
    pool.submit(Priority.READ, 0, order.job("third"))
    assert (_num_held_up(pool), order.names) == (1, [])
    _release(gates[:1])
    assert order.wait(1) == ["third"]
    _release(gates)


def test_bytes_in_flight_are_bounded(make):
    """A job that would exceed the budget waits, and none overtakes it; alone any job may run."""
    pool, order = make(4, max_bytes=100), Order()
    gates = _occupy(pool, 1, num_bytes=60)
    pool.submit(Priority.READ, 50, order.job("large"))
    pool.submit(Priority.READ, 10, order.job("small"))
    assert (_num_held_up(pool), pool.bytes_in_flight) == (2, 60)
    _release(gates)
    assert sorted(order.wait(2)) == ["large", "small"]
    pool.submit(Priority.READ, 1000, order.job("huge"))
    assert order.wait(1)[-1] == "huge"


def test_writes_take_half_of_the_budget(make):
    """The other half is for reads."""
    pool, order = make(4, max_bytes=100), Order()
    gates = _occupy(pool, 1, Priority.WRITE, 40)
    pool.submit(Priority.WRITE, 20, order.job("write"))
    pool.submit(Priority.READ, 60, order.job("read"))
    assert order.wait(1) == ["read"]
    assert _num_held_up(pool) == 1
    _release(gates)
    assert order.wait(1) == ["read", "write"]


def test_one_completion_may_start_several_jobs(make):
    """When a large job ends, all that fit into its place begin."""
    pool = make(3, max_bytes=100)
    gates = _occupy(pool, 1, num_bytes=100)
    small = [Gate() for _ in range(3)]
    for gate in small:
        pool.submit(Priority.READ, 30, gate)
    _release(gates)
    assert all(gate.entered.wait(WAIT_S) for gate in small)
    _release(small)


def test_a_faulty_job_costs_no_thread(make):
    """Jobs must not raise; after one that does the next one runs all the same."""
    pool, order = make(1), Order()

    def faulty(_staging):
        raise ValueError("injected")

    pool.submit(Priority.READ, 10, faulty)
    pool.submit(Priority.READ, 10, order.job("next"))
    assert order.wait(1) == ["next"]


def test_close_drops_waiting_jobs():
    """Running jobs end, waiting ones never start, and later jobs are refused."""
    pool, order = IoPool(1, 100), Order()
    pool.start()
    gates = _occupy(pool, 1)
    pool.submit(Priority.READ, 0, order.job("dropped"))
    closing = threading.Thread(target=pool.close)
    closing.start()
    while len(pool):  # until close() has dropped it, which cannot run before the gate opens
        closing.join(0.001)
    _release(gates)
    closing.join(WAIT_S)
    pool.submit(Priority.READ, 0, order.job("late"))
    assert not closing.is_alive()
    assert order.names == []


def test_a_staging_buffer_is_reused():
    """It grows when needed, keeps its size, and starts on a page boundary, for direct I/O."""
    staging = Staging()
    views = [staging.take(num_bytes) for num_bytes in (4096, 8192, 1 << 20, 4096)]
    assert [len(view) for view in views] == [4096, 8192, 1 << 20, 4096]
    assert views[0].obj is views[1].obj
    assert views[2].obj is views[3].obj
    assert all(isinstance(view.obj, mmap.mmap) for view in views)
