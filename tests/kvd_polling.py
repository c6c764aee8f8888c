"""Polls a running kvd, with a deadline, until it is in the state that a test waits for."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from tests.processes import KvdProcess

DEADLINE_S = 30.0
# at first; later polls are less frequent: polling takes a third of the processor time otherwise
POLL_S = 0.01
MOST_POLL_S = 0.05

T = TypeVar("T")


async def eventually(ask: Callable[[], Awaitable[T]], wanted: T) -> None:
    """Poll until the answer is `wanted`."""
    answer: T | None = None
    pause_s = POLL_S
    try:
        async with asyncio.timeout(DEADLINE_S):
            # the state belongs to another process: there is no event to wait for
            while (answer := await ask()) != wanted:
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, MOST_POLL_S)
    except TimeoutError:
        raise AssertionError(f"still {answer!r}, not {wanted!r}") from None


async def reader_stats(kvd: KvdProcess) -> kvd_pb2.GetStatsResponse:
    """Call GetStats."""
    async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/reader.sock") as channel:
        stub = kvd_pb2_grpc.ReaderStub(channel)
        return await stub.GetStats(kvd_pb2.GetStatsRequest(), timeout=DEADLINE_S)


async def counters_of(kvd: KvdProcess) -> dict[str, int]:
    """Return the counters of the only layout."""
    [layout] = (await reader_stats(kvd)).layouts
    return dict(layout.counters)


async def sessions_of(kvd: KvdProcess) -> list[kvd_pb2.SessionInfo]:
    """Call ListSessions for all of its pages."""
    found: list[kvd_pb2.SessionInfo] = []
    request = kvd_pb2.ListSessionsRequest()
    async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/reader.sock") as channel:
        stub = kvd_pb2_grpc.ReaderStub(channel)
        while True:
            page = await stub.ListSessions(request, timeout=DEADLINE_S)
            found += page.sessions
            request.page_token = page.next_page_token
            if not request.page_token:
                return found


async def until_kept(kvd: KvdProcess, session_id: str) -> None:
    """Return when a restarted kvd would find a session in DRAM: blocks hashed, index committed."""
    session = kvd_pb2.SessionKey(session_id=session_id)
    described = kvd_pb2.DescribeSessionRequest(session=session)
    async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/reader.sock") as channel:
        reader = kvd_pb2_grpc.ReaderStub(channel)

        async def is_hashed() -> bool:
            found = await reader.DescribeSession(described, timeout=DEADLINE_S)
            return all(part.hashed for part in (*found.blocks, *found.states))

        await eventually(is_hashed, wanted=True)
    async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/operator.sock") as channel:
        # An operator is answered once the index has taken the change, and all before it.
        set_ttl = kvd_pb2.SetTtlRequest(session=session, ttl_s=3600)
        await kvd_pb2_grpc.OperatorStub(channel).SetTtl(set_ttl, timeout=DEADLINE_S)


async def until_indexed(kvd: KvdProcess) -> None:
    """Return when the index has committed all changes so far, such as a new engine's layout."""
    nobodys = kvd_pb2.FlushRequest(filter=kvd_pb2.SessionFilter(tenant="nobody"))
    async with grpc.aio.insecure_channel(f"unix:{kvd.runtime_dir}/operator.sock") as channel:
        await kvd_pb2_grpc.OperatorStub(channel).Flush(nobodys, timeout=DEADLINE_S)


async def all_clean(kvd: KvdProcess) -> None:
    """Return when no block is dirty: every stored block is on SSD."""

    async def dirty_bytes() -> int:
        return sum(layout.dirty_bytes for layout in (await reader_stats(kvd)).layouts)

    await eventually(dirty_bytes, 0)
