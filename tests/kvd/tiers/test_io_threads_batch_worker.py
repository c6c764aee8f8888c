"""One thread, whole batches, in order."""

import threading
import time

from kvd.tiers.io_threads import BatchWorker


def test_waiting_items_are_one_batch():
    """Items added while a batch is handled form the next one, in order, up to the bound."""
    batches = []
    entered, proceed = threading.Event(), threading.Event()

    def handle(batch):
        batches.append(batch)
        entered.set()
        proceed.wait(30)

    worker = BatchWorker("test", handle, max_batch=3)
    worker.start()
    worker.put(0)
    assert entered.wait(30)
    for item in range(1, 6):
        worker.put(item)
    assert len(worker) == 5
    proceed.set()
    worker.close()
    assert batches == [[0], [1, 2, 3], [4, 5]]


def test_batches_keep_their_distance():
    """Under load they begin as far apart as requested, so that many items share one."""
    gather_s, num_batches = 0.02, 4
    handled = threading.Semaphore(0)
    worker = BatchWorker("test", lambda _: handled.release(), 1, gather_s)
    began_s = time.monotonic()
    worker.start()
    for item in range(num_batches):
        worker.put(item)
        assert handled.acquire(timeout=30)
    assert time.monotonic() - began_s >= (num_batches - 1) * gather_s  # a slow machine takes longer
    worker.close()


def test_close_handles_queued_items():
    """An orderly end loses no item."""
    handled = []
    worker = BatchWorker("test", handled.extend, max_batch=2)
    for item in range(5):
        worker.put(item)
    worker.start()
    worker.close()
    assert handled == list(range(5))


def test_close_can_discard():
    """A hurried end drops items that have not begun, and waits for others."""
    handled = []
    entered, proceed = threading.Event(), threading.Event()

    def handle(batch):
        entered.set()
        assert proceed.wait(20)
        handled.extend(batch)

    worker = BatchWorker("test", handle, max_batch=2)
    worker.start()
    worker.put(0)
    assert entered.wait(30)
    for item in (1, 2, 3):
        worker.put(item)
    closing = threading.Thread(target=worker.close, kwargs={"discard": True})
    closing.start()
    until_s = time.monotonic() + 10
    while len(worker):  # until close() has dropped it, which waits for the running batch
        assert time.monotonic() < until_s
        closing.join(0.001)
    assert closing.is_alive()
    proceed.set()
    closing.join(30)
    assert (handled, closing.is_alive()) == ([0], False)


def test_close_without_start():
    """A worker that never ran can be closed."""
    BatchWorker("test", list, max_batch=1).close()
