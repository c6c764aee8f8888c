"""Waits for what threads do with memory that is somebody else's: nobody leaves before they end."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def finished_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread; when this returns, or is cancelled, the thread is done.

    So a caller may release slots afterwards, whatever has happened.
    """
    return await finished(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


async def finished(work: "asyncio.Future[T]", interrupt: Callable[[], object] = lambda: None) -> T:
    """Wait for what runs in a thread; when this returns, or is cancelled, it is done.

    Args:
        work: what runs.
        interrupt: called when this is cancelled, to have it end soon.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        interrupt()
        with suppress(Exception):  # nobody is left whom it could be told
            await asyncio.wait((work,))
            work.result()
        raise
