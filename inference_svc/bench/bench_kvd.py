"""A kvd of the bench's own: a real `kvd serve` in the bench's directories."""

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

from shared.errors import UnavailableError
from shared.pb.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from shared.runtime_dir import OPERATOR_SOCKET, channel_options

READY_S = 120.0
EXIT_S = 60.0
EXIT_POLL_S = 0.1  # at which an early end is noticed; readiness is noticed at once
CALL_S = 60.0
SETTLE_S = 300.0
POLL_S = 0.01
QUIET_S = 0.03  # without any work done: kvd is idle
_QUICK_RETRY = (
    ("grpc.initial_reconnect_backoff_ms", 10),
    ("grpc.min_reconnect_backoff_ms", 10),
    ("grpc.max_reconnect_backoff_ms", 20),
)


class KvdFailedError(UnavailableError):
    """The bench's kvd did not start, or ended."""

    reason = "bench_kvd_failed"


@dataclass(frozen=True, slots=True)
class KvdSizes:
    """What one kvd of the bench is given.

    Attributes:
        ssd_bytes: 0: no SSD tier.
        writes_through: to SSD at once; else only what has to leave DRAM is written.
    """

    dram_bytes: int
    ssd_bytes: int = 0
    segment_bytes: int = 64 << 20
    writes_through: bool = True

    def toml(self) -> str:
        """Settings: nothing expires, nothing outlives the process but what is on SSD."""
        admission = "write_through" if self.writes_through else "on_evict"
        return f"""
[dram]
bytes = {self.dram_bytes}
keep = "none"
[ssd]
bytes = {self.ssd_bytes}
segment_bytes = {self.segment_bytes}
reserve_bytes = 0
admission = "{admission}"
[sessions]
default_ttl = "never"
[limits]
load_wait = "120s"
[log]
level = "warning"
format = "json"
"""


class BenchKvd:
    """One running kvd."""

    def __init__(self, directory: Path, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self._directory = directory
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
        paths = ("--runtime-dir", self.runtime_dir, "--state-dir", self._directory / "state")
        with log_path.open("ab") as log:
            # Not asyncio's: uvloop forks, which gRPC's threads do not like; this one does not.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - returns after the exec
                (sys.executable, "-m", "kvd", "serve", "--config", config, *paths),
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
        self._operator = kvd_pb2_grpc.OperatorStub(channel)
        self._reader = kvd_pb2_grpc.ReaderStub(channel)

    async def flush(self) -> None:
        """Drop every session."""
        assert self._operator is not None, "kvd is started first"  # noqa: S101
        await self._operator.Flush(kvd_pb2.FlushRequest(all=True), timeout=CALL_S)

    async def until_clean(self) -> None:
        """Return when everything stored is on SSD.

        Raises:
            TimeoutError: not within SETTLE_S.
        """
        assert self._reader is not None, "kvd is started first"  # noqa: S101
        async with asyncio.timeout(SETTLE_S):
            while True:
                request = kvd_pb2.GetStatsRequest()
                stats = await self._reader.GetStats(request, timeout=CALL_S)
                if not any(layout.dirty_bytes for layout in stats.layouts):
                    return
                await asyncio.sleep(POLL_S)

    async def until_quiet(self) -> None:
        """Return when kvd has had nothing to do for a while: what is timed next is timed alone."""
        async with asyncio.timeout(SETTLE_S):
            before = -1.0
            while (now := self.cpu_s()) != before:
                before = now
                await asyncio.sleep(QUIET_S)

    def cpu_s(self) -> float:
        """Processor time it has used, in steps of 10 ms."""
        assert self._process is not None, "kvd is started first"  # noqa: S101
        return float(sum(psutil.Process(self._process.pid).cpu_times()[:2]))

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
async def running_kvd(state: Path, runtime: Path, sizes: KvdSizes) -> AsyncIterator[BenchKvd]:
    """A kvd that serves, killed at the end.

    Args:
        state: a new directory, on the disk of the SSD tier.
        runtime: a new directory with a short name, for sockets.
        sizes: of its tiers.
    """
    kvd = BenchKvd(state, runtime)
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
