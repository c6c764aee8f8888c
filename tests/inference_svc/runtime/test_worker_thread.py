"""Calls on a thread run to their ends, whether awaited or not, and none after it is closed."""

import asyncio
import gc
import threading

import pytest

from inference_svc.runtime.worker_thread import WorkerThread


@pytest.fixture
def thread():
    made = WorkerThread("test")
    yield made
    made.close()


async def test_calls_run_in_order_on_the_thread(thread):
    """With their arguments; results and exceptions are the caller's."""
    seen = []

    def call(number, *, name):
        seen.append((number, name))
        return threading.current_thread().name

    names = await asyncio.gather(*(thread.run(call, n, name=str(n)) for n in range(4)))
    assert set(names) == {"test_0"}
    assert seen == [(n, str(n)) for n in range(4)]
    with pytest.raises(ZeroDivisionError):
        await thread.run(divmod, 1, 0)


def test_a_call_runs_while_its_caller_continues(thread):
    """The caller waits for it later."""
    may_end = threading.Event()
    begun = thread.submit(may_end.wait)
    assert not begun.done()
    may_end.set()
    assert begun.result()
    with pytest.raises(ZeroDivisionError):
        thread.submit(divmod, 1, 0).result()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_waits_for_its_call(thread, fails):
    """Memory that the call uses may be freed then; its exception is dropped."""
    gc.freeze()  # only garbage of this test matters: a full collection takes a second
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
    has_begun, may_end, is_over = (threading.Event() for _ in range(3))

    def call():
        has_begun.set()
        may_end.wait()
        is_over.set()
        if fails:
            raise OSError("gone")

    caller = asyncio.create_task(thread.run(call))
    await asyncio.to_thread(has_begun.wait)
    caller.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert is_over.is_set()
    del caller
    gc.collect()
    assert not complaints


async def test_queued_calls_are_dropped_at_the_end(thread):
    """A running one is waited for."""
    has_begun, may_end = threading.Event(), threading.Event()

    def call():
        has_begun.set()
        may_end.wait()
        return "done"

    running = asyncio.create_task(thread.run(call))
    await asyncio.to_thread(has_begun.wait)
    queued = asyncio.create_task(thread.run(call))
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(thread.close))
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert not closing.done()
    may_end.set()
    assert await running == "done"
    await closing
