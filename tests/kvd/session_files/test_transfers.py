"""A transfer waits for its caller for a bounded time."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvd.errors import StalledTransferError
from kvd.session_files.transfers import with_timeout


async def test_a_silent_caller_is_given_up():
    """The next message has a time limit; those in time are passed on."""

    async def messages() -> AsyncIterator[int]:
        yield 1
        yield 2
        await asyncio.get_running_loop().create_future()

    coming = with_timeout(messages(), 0.05)
    assert [await anext(coming), await anext(coming)] == [1, 2]
    with pytest.raises(StalledTransferError, match="send the file again"):
        await anext(coming)
