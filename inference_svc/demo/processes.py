"""The demo's child processes: started as an operator would, ready when gRPC health says so."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.errors import UnavailableError

READY_DEADLINE_S = 90.0
STOP_DEADLINE_S = 30.0
# A child is not there yet when we first connect: retry soon (grpc waits 1 s and more by default).
CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


class ChildFailedError(UnavailableError):
    """A process of the demo ended or never became ready."""

    reason = "child_failed"


class ChildProcess:
    """One `python -m MODULE ARGUMENTS` with its log in a file.

    Attributes:
        name: for people.
        address: gRPC target whose health tells readiness, "unix:/…".
    """

    def __init__(self, name: str, arguments: tuple[str, ...], address: str, log_path: Path) -> None:
        self.name = name
        self.address = address
        self._arguments = arguments
        self._log_path = log_path
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and return once it serves.

        Raises:
            ChildFailedError: if it ends, or does not serve in READY_DEADLINE_S.
        """
        with self._log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", *self._arguments),
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is ours: we end it in good order
            )
        serving = asyncio.create_task(self._serving())
        ended = asyncio.create_task(self._process.wait())
        done, rest = await asyncio.wait(
            {serving, ended}, timeout=READY_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED
        )
        for task in rest:
            task.cancel()
        if ended in done:
            raise self._failed(f"ended with exit code {ended.result()}")
        if serving not in done:
            raise self._failed(f"did not serve within {READY_DEADLINE_S:.0f} s")
        await serving

    async def kill(self) -> None:
        """End it with SIGKILL: nothing is saved on the way out."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End it with SIGTERM, or with SIGKILL if it does not end in STOP_DEADLINE_S."""
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def wait(self) -> None:
        """Wait until it ends by itself."""
        if self._process is not None:
            await self._process.wait()

    async def _end(self, signal_number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        os.kill(self._process.pid, signal_number)
        await self._process.wait()

    async def _serving(self) -> None:
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            changes = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), wait_for_ready=True
            )
            async for change in changes:
                if change.status == health_pb2.HealthCheckResponse.SERVING:
                    return

    def _failed(self, what: str) -> ChildFailedError:
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        last = lines[-1][:300] if lines else "its log is empty"
        return ChildFailedError(f"{self.name} {what} ({last})", f"read {self._log_path}")
