"""The demo's three processes: kvd, the service that reuses, the service that recomputes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from inference_svc.client import InferenceClient
from shared.children.child_process import ChildFailedError, ChildProcess
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.process.runtime_dir import READER_SOCKET, channel_options

MODEL_DIR = Path(__file__).parent / "model"
SETTLE_DEADLINE_S = 30.0  # for write-back, and for the engine to find the restarted kvd
POLL_S = 0.05
CALL_S = 10.0
# Both services compute on one thread: times on a small machine are then comparable.
MODEL_FLAGS = ("--model", str(MODEL_DIR), "--dtype", "float32", "--threads", "1")


class DemoServers:
    """kvd, a service that reuses and one that recomputes.

    Attributes:
        kvd_dir: runtime directory of kvd, for `kvd … --runtime-dir`.
        cached: address of the service that reuses.
        recompute: address of the service that recomputes, which never talks to kvd.
    """

    def __init__(self, directory: Path) -> None:
        self.kvd_dir = directory / "kvd"
        self.cached = f"unix:{directory}/inference.sock"
        self.recompute = f"unix:{directory}/recompute.sock"
        self._kvd = ChildProcess(
            "kvd",
            (
                *("kvd", "serve", "--runtime-dir", str(self.kvd_dir)),
                *("--state-dir", str(directory / "kvd-state"), "--dram", "256MB", "--ssd", "1GB"),
                # So that after the kill everything comes from SSD, and nothing is left in /dev/shm.
                *("--dram-keep", "none"),
            ),
            f"unix:{self.kvd_dir / READER_SOCKET}",
            directory / "kvd.log",
        )
        # What a turn reuses comes from kvd, always: that is what the demo shows.
        reuse_flags = ("--load-policy", "always", "--no-residents")
        kvd_flags = ("--kvd-runtime-dir", str(self.kvd_dir), *reuse_flags)
        self._services = [
            _service("inference", directory, self.cached, ("--mode", "cached", *kvd_flags)),
            _service("recompute", directory, self.recompute, ("--mode", "recompute")),
        ]

    async def start(self) -> None:
        """Start all three, and wait until the engine is attached."""
        await asyncio.gather(*(child.start() for child in (self._kvd, *self._services)))
        await self._attached()

    async def kill_and_restart_kvd(self, stored_tokens: Mapping[str, int]) -> None:
        """SIGKILL kvd once it has everything on SSD, start it again, wait for the engine.

        Args:
            stored_tokens: tokens of each session that kvd must hold: saves end after answers.
        """
        await self._written(stored_tokens)
        await self._kvd.kill()
        await self._kvd.start()
        await self._attached()

    async def stop(self) -> None:
        """Stop all three, the services first."""
        await asyncio.gather(*(child.stop() for child in self._services))
        await self._kvd.stop()

    async def wait_any(self) -> None:
        """Return when one of them ends by itself."""
        waits = [asyncio.ensure_future(child.wait()) for child in (self._kvd, *self._services)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    async def _written(self, stored_tokens: Mapping[str, int]) -> None:
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

            await _until(is_written, "kvd did not write everything to SSD")

    async def _attached(self) -> None:
        async with InferenceClient(self.cached) as client:

            async def is_attached() -> bool:
                return (await client.get_model()).kvd_state == "attached"

            await _until(is_attached, "the engine did not attach to kvd")


@asynccontextmanager
async def running_servers(directory: Path) -> AsyncIterator[DemoServers]:
    """Run the demo's processes in `directory`, and stop them at the end."""
    servers = DemoServers(directory)
    try:
        await servers.start()
        yield servers
    finally:
        await servers.stop()


def _service(name: str, directory: Path, listen: str, flags: tuple[str, ...]) -> ChildProcess:
    arguments = (
        *("inference_svc.cli.main", "serve", "--listen", listen, *MODEL_FLAGS, *flags),
        *("--state-dir", str(directory / f"{name}-state")),
    )
    return ChildProcess(name, arguments, listen, directory / f"{name}.log")


async def _until(is_so: Callable[[], Awaitable[bool]], otherwise: str) -> None:
    """Ask again until it is so: kvd and the engine do these things in the background.

    Raises:
        ChildFailedError: after SETTLE_DEADLINE_S.
    """
    try:
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            while not await is_so():  # noqa: ASYNC110  # the event is in another process
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise ChildFailedError(otherwise, "read the logs in the demo's directory") from error
