"""ChildKvd: a `kvd serve` in a child process, with directories of its own, for benchmarks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from shared.children.child_process import ChildProcess
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import OPERATOR_SOCKET, channel_options
from shared.types.session_key import SessionKey

CALL_S = 60.0
SETTLE_S = 300.0  # deadline for everything to be on SSD, or for kvd to become idle
POLL_S = 0.002
QUIET_S = 0.05  # kvd is idle if it has used no processor time for so long


class ChildKvd:
    """A running kvd in a child process.

    Attributes:
        process: the child process.
        runtime_dir: the directory of its sockets.
    """

    def __init__(self, process: ChildProcess, runtime_dir: Path, channel: grpc.aio.Channel) -> None:
        self.process = process
        self.runtime_dir = runtime_dir
        self._operator = kvd_pb2_grpc.OperatorStub(channel)
        self._reader = kvd_pb2_grpc.ReaderStub(channel)

    async def stats(self) -> kvd_pb2.GetStatsResponse:
        """Return the figures of `kvd stats`."""
        answer: kvd_pb2.GetStatsResponse = await self._reader.GetStats(
            kvd_pb2.GetStatsRequest(), timeout=CALL_S
        )
        return answer

    async def flush(self, key: SessionKey | None = None) -> None:
        """Drop a session, or all (None)."""
        request = kvd_pb2.FlushRequest(all=True)
        if key is not None:
            tenant, model, session_id = key
            session = kvd_pb2.SessionKey(tenant=tenant, model=model, session_id=session_id)
            request = kvd_pb2.FlushRequest(session=session)
        await self._operator.Flush(request, timeout=CALL_S)

    async def until_clean(self) -> None:
        """Wait until everything stored is on SSD and in the index.

        Raises:
            TimeoutError: that does not happen within SETTLE_S.
        """
        async with asyncio.timeout(SETTLE_S):
            while await self._has_dirty():  # noqa: ASYNC110  # the event is in another process
                await asyncio.sleep(POLL_S)

    async def _has_dirty(self) -> bool:
        return any(layout.dirty_bytes for layout in (await self.stats()).layouts)

    async def until_quiet(self) -> None:
        """Wait until kvd has been idle for QUIET_S, so that it does not disturb a measurement.

        Raises:
            TimeoutError: that does not happen within SETTLE_S.
        """
        async with asyncio.timeout(SETTLE_S):
            before = -1.0
            while (now := self.process.cpu_s()) != before:
                before = now
                await asyncio.sleep(QUIET_S)


@asynccontextmanager
async def running_child_kvd(
    settings: str, directory: Path, runtime_dir: Path, state_dir: Path
) -> AsyncIterator[ChildKvd]:
    """Run a kvd inside the block, and kill it at the end, so that only SSD survives.

    Args:
        settings: TOML of all settings that differ from the defaults.
        directory: directory for settings and log.
        runtime_dir: directory for sockets, with a short name.
        state_dir: directory on the disk of the SSD tier.

    Raises:
        ChildFailedError: it does not start.
    """
    config = directory / "kvd.toml"
    config.write_text(settings, encoding="utf-8")
    address = f"unix:{runtime_dir / OPERATOR_SOCKET}"
    arguments = ("kvd", "serve", "--config", config, "--runtime-dir", runtime_dir)
    process = ChildProcess(
        "kvd", (*arguments, "--state-dir", state_dir), address, directory / "kvd.log"
    )
    try:
        await process.start()
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            yield ChildKvd(process, runtime_dir, channel)
    finally:
        await process.kill()
