"""Threads that run calls which block, awaited from the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThread:
    """One or more threads of one name; calls begin in the order in which they were made."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on the thread and return its result.

        If the caller is cancelled, the call still runs to its end first: what it uses may only be
        released when the thread no longer uses it.
        """
        loop = asyncio.get_running_loop()
        return await _to_its_end(
            loop.run_in_executor(self._executor, lambda: call(*args, **kwargs))
        )

    def begin(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a call run on the thread, for a caller that is no event loop and waits later."""
        return self._executor.submit(call, *args, **kwargs)

    def close(self) -> None:
        """Wait for the call that runs and end the thread; queued calls are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _to_its_end(future: "asyncio.Future[T]") -> T:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait({future})
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it as never retrieved
        raise
