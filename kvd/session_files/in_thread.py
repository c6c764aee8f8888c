"""Calls in threads that use borrowed memory: the caller never continues before they have ended."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread; when this returns or is cancelled, the thread is done.

    So the caller may release slots afterwards in every case.
    """
    return await wait_for_end(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


async def wait_for_end(
    work: "asyncio.Future[T]", interrupt: Callable[[], object] = lambda: None
) -> T:
    """Wait for a call in a thread; when this returns or is cancelled, the call has ended.

    Args:
        work: the call.
        interrupt: called when this is cancelled, to end the call soon.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        interrupt()
        with suppress(Exception):  # its error has no receiver: the caller is cancelled
            await asyncio.wait((work,))
            work.result()
        raise
