"""One thread, whole batches, in order."""

import threading

from kvd.tiers.batch_worker import BatchWorker


def test_what_waits_is_one_batch():
    """Items put while a batch is handled come together in the next, in order, up to the bound."""
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


def test_close_handles_what_is_queued():
    """Nothing that was put is lost by an orderly end."""
    handled = []
    worker = BatchWorker("test", handled.extend, max_batch=2)
    for item in range(5):
        worker.put(item)
    worker.start()
    worker.close()
    assert handled == list(range(5))


def test_close_can_discard():
    """A hurried end drops what has not begun."""
    handled = []
    worker = BatchWorker("test", handled.extend, max_batch=2)
    worker.put(1)
    worker.start()
    worker.close(discard=True)
    assert handled in ([], [1])


def test_close_without_start():
    """A worker that never ran can be closed."""
    BatchWorker("test", list, max_batch=1).close()
