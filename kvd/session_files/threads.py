"""Copying in a thread, for callers that may be cancelled."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def finished_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread; when this returns, or is cancelled, the thread is done.

    So a caller may give slots back afterwards, whatever has happened.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise
