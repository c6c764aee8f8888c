"""Worker threads for blocking calls, which the event loop awaits."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
        loop = asyncio.get_running_loop()
        return await _wait_until_done(
            loop.run_in_executor(self._executor, lambda: call(*args, **kwargs))
        )

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the thread, for callers outside of the event loop.

        Returns:
            The result, to be waited for by a thread that may block.
        """
        return self._executor.submit(call, *args, **kwargs)

    def close(self) -> None:
        """Wait for running calls and end the threads; queued calls are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _wait_until_done(future: "asyncio.Future[T]") -> T:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it as never retrieved
        raise
