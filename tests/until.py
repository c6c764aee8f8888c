"""Waiting in a test for a state that has no event."""

import asyncio
from collections.abc import Callable

DEADLINE_S = 30.0
POLL_S = 0.001


async def until(is_so: Callable[[], object]) -> None:
    """Poll until it is so."""
    async with asyncio.timeout(DEADLINE_S):
        while not is_so():
            await _pause()


async def _pause() -> None:
    await asyncio.sleep(POLL_S)
