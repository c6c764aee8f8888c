"""The demo's three processes: kvd, the service that reuses, the service that recomputes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from inference_svc.installation import SHIPPED_MODEL
from inference_svc.pair import Pair, service_child, wait_for_first_end, wait_until
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import READER_SOCKET, channel_options

CALL_S = 10.0
# Both services compute on one thread: times on a small machine are then comparable.
MODEL_FLAGS = ("--model", str(SHIPPED_MODEL), "--dtype", "float32", "--threads", "1")
# Reused KV always comes from kvd, to demonstrate that.
REUSE_FLAGS = ("--mode", "cached", "--load-policy", "always", "--no-residents")


class DemoServers:
    """kvd, a service that reuses and one that recomputes.

    Attributes:
        kvd_dir: runtime directory of kvd, for `kvd … --runtime-dir`.
        cached: address of the service that reuses.
        recompute: address of the service that recomputes, which never talks to kvd.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pair = Pair(
            directory, directory, ("--dram", "256MB", "--ssd", "1GB"), (*MODEL_FLAGS, *REUSE_FLAGS)
        )
        self.kvd_dir = self._pair.kvd_dir
        self.cached = self._pair.address
        self.recompute = f"unix:{directory}/recompute.sock"
        self._recompute = service_child(
            "recompute", self.recompute, directory, (*MODEL_FLAGS, "--mode", "recompute")
        )

    async def start(self) -> None:
        """Start all three, and wait until the engine is attached."""
        await asyncio.gather(self._pair.start(), self._recompute.start())

    async def kill_and_restart_kvd(self, stored_tokens: Mapping[str, int]) -> None:
        """Kill kvd (SIGKILL) once everything is on SSD, start it again, and wait for the engine.

        Args:
            stored_tokens: tokens of each session that kvd must have, because saves may end after
                answers.
        """
        await self._wait_until_written(stored_tokens)
        await self._pair.kvd.kill()
        await self._pair.kvd.start()
        await self._pair.wait_until_attached()

    async def stop(self) -> None:
        """Stop all three."""
        await asyncio.gather(self._pair.stop(), self._recompute.stop())

    async def wait_any(self) -> None:
        """Wait until one of them ends by itself."""
        await wait_for_first_end((self._pair.kvd, self._pair.service, self._recompute))

    async def _wait_until_written(self, stored_tokens: Mapping[str, int]) -> None:
        async with grpc.aio.insecure_channel(
            f"unix:{self.kvd_dir / READER_SOCKET}", options=channel_options()
        ) as channel:
            reader = kvd_pb2_grpc.ReaderStub(channel)

            async def is_written() -> bool:
                page = await reader.ListSessions(kvd_pb2.ListSessionsRequest(), timeout=CALL_S)
                stored = {info.session.session_id: info.num_tokens for info in page.sessions}
                stats = await reader.GetStats(kvd_pb2.GetStatsRequest(), timeout=CALL_S)
                has_dirty = any(layout.dirty_bytes for layout in stats.layouts)
                return stored_tokens.items() <= stored.items() and not has_dirty

            await wait_until(is_written, "kvd did not write everything to SSD", self._directory)


@asynccontextmanager
async def running_servers(directory: Path) -> AsyncIterator[DemoServers]:
    """Run the demo's processes in `directory`, and stop them at the end."""
    servers = DemoServers(directory)
    try:
        await servers.start()
        yield servers
    finally:
        await servers.stop()
