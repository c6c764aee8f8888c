"""A kvd of the bench's own: a real `kvd serve` in the bench's directories, timed and looked at."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvd.bench.workspace import Workspace
from shared.errors import UnavailableError
from shared.kv_layout import KVLayout
from shared.kvd_client import KvdClient
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.runtime_dir import OPERATOR_SOCKET, channel_options
from shared.session_key import SessionKey

READY_S = 120.0
EXIT_S = 60.0
EXIT_POLL_S = 0.1  # at which an early end is noticed; readiness is noticed at once
ATTACH_S = 60.0
CALL_S = 60.0
CLEAN_S = 300.0  # until everything is on SSD
POLL_S = 0.002
QUIET_S = 0.05  # without any work done: kvd is idle
_QUICK_RETRY = (
    ("grpc.initial_reconnect_backoff_ms", 10),
    ("grpc.min_reconnect_backoff_ms", 10),
    ("grpc.max_reconnect_backoff_ms", 20),
)


class KvdFailedError(UnavailableError):
    """The bench's kvd did not start, or ended, or answered what it should not."""

    reason = "bench_kvd_failed"


@dataclass(frozen=True)
class KvdSizes:
    """What one kvd of the bench is given; everything else is as the bench's settings say."""

    dram_bytes: int
    ssd_bytes: int
    segment_bytes: int
    io_threads: int
    prefault: bool = True
    admission: str = "write_through"

    def toml(self) -> str:
        """Settings: nothing expires, nothing outlives the process but what is on SSD."""
        return f"""
[dram]
bytes = {self.dram_bytes}
prefault = {str(self.prefault).lower()}
keep = "none"
[ssd]
bytes = {self.ssd_bytes}
segment_bytes = {self.segment_bytes}
io_threads = {self.io_threads}
reserve_bytes = 0
admission = "{self.admission}"
[sessions]
default_ttl = "never"
max_sessions = 1000000
[log]
level = "warning"
format = "json"
"""


class BenchKvd:
    """One running kvd.

    Attributes:
        ready_s: from exec to SERVING.
    """

    def __init__(self, directory: Path, runtime_dir: Path, state_dir: Path) -> None:
        self.ready_s = 0.0
        self.runtime_dir = runtime_dir
        self._directory = directory
        self._state_dir = state_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._operator: kvd_pb2_grpc.OperatorStub | None = None
        self._reader: kvd_pb2_grpc.ReaderStub | None = None

    async def start(self, sizes: KvdSizes, stack: AsyncExitStack) -> None:
        """Start it and wait until it serves; `stack` ends it.

        Raises:
            KvdFailedError: it did not.
        """
        config = self._directory / "kvd.toml"
        config.write_text(sizes.toml(), encoding="utf-8")
        log_path = self._directory / "kvd.log"
        command = ("-m", "kvd", "serve", "--config", str(config))
        paths = ("--runtime-dir", str(self.runtime_dir), "--state-dir", str(self._state_dir))
        started = time.perf_counter()
        with log_path.open("ab") as log:
            # Not asyncio's: uvloop forks, which gRPC's threads do not like; this one does not.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns after the exec
                (sys.executable, *command, *paths),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the bench, which then ends its kvd
            )
        stack.push_async_callback(self._stop)
        channel = grpc.aio.insecure_channel(
            f"unix:{self.runtime_dir / OPERATOR_SOCKET}",
            options=(*channel_options(), *_QUICK_RETRY),
        )
        await stack.enter_async_context(channel)
        await self._until_serving(channel, log_path)
        self.ready_s = time.perf_counter() - started
        self._operator = kvd_pb2_grpc.OperatorStub(channel)
        self._reader = kvd_pb2_grpc.ReaderStub(channel)

    @asynccontextmanager
    async def client(self, layout: KVLayout) -> AsyncIterator[KvdClient]:
        """An attached client, as an engine has it, whose arena is mapped and touched."""
        client = KvdClient(self.runtime_dir, layout, "kvd-bench")
        running = asyncio.create_task(client.run())
        try:
            await client.wait_attached(ATTACH_S)
            yield client
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def stats(self) -> kvd_pb2.GetStatsResponse:
        """What `kvd stats` shows."""
        assert self._reader is not None, "kvd is started first"  # noqa: S101
        answer: kvd_pb2.GetStatsResponse = await self._reader.GetStats(
            kvd_pb2.GetStatsRequest(), timeout=CALL_S
        )
        return answer

    async def flush(self, key: SessionKey | None) -> None:
        """Drop a session, or (None) all."""
        assert self._operator is not None, "kvd is started first"  # noqa: S101
        message = None
        if key is not None:
            message = kvd_pb2.SessionKey(
                tenant=key.tenant, model=key.model, session_id=key.session_id
            )
        request = kvd_pb2.FlushRequest(session=message, all=key is None)
        await self._operator.Flush(request, timeout=CALL_S)

    async def until_clean(self) -> None:
        """Return when everything stored is on SSD and in the index.

        Raises:
            TimeoutError: not within CLEAN_S.
        """
        async with asyncio.timeout(CLEAN_S):
            while True:
                if not any(layout.dirty_bytes for layout in (await self.stats()).layouts):
                    return
                await asyncio.sleep(POLL_S)

    async def until_quiet(self) -> None:
        """Return when kvd has had nothing to do for a while: what is timed next is timed alone."""
        async with asyncio.timeout(CLEAN_S):
            before = -1.0
            while (now := self.cpu_s()) != before:
                before = now
                await asyncio.sleep(QUIET_S)

    def cpu_s(self) -> float:
        """Processor time it has used, in steps of 10 ms."""
        return float(sum(self._psutil().cpu_times()[:2]))

    def rss_bytes(self) -> int:
        """Its resident memory."""
        return int(self._psutil().memory_info().rss)

    def _psutil(self) -> psutil.Process:
        assert self._process is not None, "kvd is started first"  # noqa: S101
        return psutil.Process(self._process.pid)

    async def _until_serving(self, channel: grpc.aio.Channel, log_path: Path) -> None:
        assert self._process is not None, "kvd is started first"  # noqa: S101
        ready = asyncio.ensure_future(_serving(channel))
        until = time.monotonic() + READY_S
        try:
            while not ready.done() and self._process.poll() is None and time.monotonic() < until:
                await asyncio.wait((ready,), timeout=EXIT_POLL_S)
            if not ready.done() or ready.exception() is not None:
                log = await asyncio.to_thread(log_path.read_text, encoding="utf-8")
                raise KvdFailedError("the bench's kvd did not start", log[-2000:])
        finally:
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _stop(self) -> None:
        """End it at once: nothing in it is wanted any more, and its directory goes with it."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait, EXIT_S)


@asynccontextmanager
async def running_kvd(
    work: Workspace, name: str, sizes: KvdSizes, state_dir: Path | None = None
) -> AsyncIterator[BenchKvd]:
    """A kvd that serves, killed at the end; it keeps its state in `state_dir`, or a new one."""
    directory, runtime_dir = work.state / name, work.runtime / name
    state_dir = state_dir or directory / "state"
    for path in (directory, runtime_dir, state_dir):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    kvd = BenchKvd(directory, runtime_dir, state_dir)
    async with AsyncExitStack() as stack:
        await kvd.start(sizes, stack)
        yield kvd


async def _serving(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest()
    stub = health_pb2_grpc.HealthStub(channel)
    async for answer in stub.Watch(request, wait_for_ready=True):
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return


def _environment() -> dict[str, str]:
    """Ours without what would configure the bench's kvd, or tie it to our supervisor."""
    ours = {"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID", "STATE_DIRECTORY"}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("KVD_")
    }
