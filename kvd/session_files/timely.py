"""Waiting for whoever sends, but not for ever."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from kvd.errors import StalledTransferError

T = TypeVar("T")


async def timely(messages: AsyncIterator[T], silence_s: float) -> AsyncGenerator[T, None]:
    """Pass messages on.

    Raises:
        StalledTransferError: the next one has not come within `silence_s`.
    """
    while True:
        try:
            async with asyncio.timeout(silence_s):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise StalledTransferError(
                f"nothing has come for {silence_s:g} s", "send the file again"
            ) from error
        yield message
