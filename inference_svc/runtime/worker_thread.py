"""Worker threads for blocking calls, which the event loop awaits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """One or more threads of one name; calls start in the order in which they were submitted."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the thread and return its result.

        If the caller is cancelled, this still waits for the call to end before it raises
        CancelledError: a thread cannot be interrupted, and the caller may only release what the
        call uses when the thread no longer uses it.
        """
        # The future of `run_in_executor` would have to be shielded: another turn of the event loop.
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        called = self._executor.submit(call, *args, **kwargs)
        called.add_done_callback(lambda _: _report_end(loop, ended))
        try:
            await ended
        except asyncio.CancelledError:
            await asyncio.wait({asyncio.wrap_future(called)})
            if not called.cancelled():
                called.exception()  # dropped
            raise
        if called.cancelled():  # the thread was closed before
            raise asyncio.CancelledError
        return called.result()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the thread, for callers outside of the event loop.

        Returns:
            The result, to be waited for by a thread that may block.
        """
        return self._executor.submit(call, *args, **kwargs)

    def close(self) -> None:
        """Wait for running calls and end the threads; queued calls are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def _report_end(loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[None]") -> None:
    """Set a future of an event loop, from any thread; do nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_set, ended)


def _set(ended: "asyncio.Future[None]") -> None:
    if not ended.done():  # else its waiter was cancelled
        ended.set_result(None)
