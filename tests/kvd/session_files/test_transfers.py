"""A transfer waits for its caller, but not for ever."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvd.errors import StalledTransferError
from kvd.session_files.transfers import with_timeout


async def test_who_falls_silent_is_given_up():
    """The next message has its time; what comes in time is passed on."""

    async def messages() -> AsyncIterator[int]:
        yield 1
        yield 2
        await asyncio.get_running_loop().create_future()

    coming = with_timeout(messages(), 0.05)
    assert [await anext(coming), await anext(coming)] == [1, 2]
    with pytest.raises(StalledTransferError, match="send the file again"):
        await anext(coming)
