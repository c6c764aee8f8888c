"""ChildProcess: start a child that serves gRPC, wait until its health is SERVING, and end it.

It owns one child at a time and its log file, and knows nothing of what the child serves. It is for
developers' machines, the demo, benchmarks and tests; operators use a supervisor.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.access.channels import ClientCredentials, aio_channel_of
from shared.children import bound_child
from shared.types.errors import UnavailableError

READY_DEADLINE_S = 120.0  # a loaded machine imports slowly
# A child that has used the processor meanwhile gets the deadline again, up to so many times: to
# read an index of a million sessions takes as long as it takes.
READY_ROUNDS = 10
BUSY_CPU_S = 1.0
STOP_DEADLINE_S = 30.0
MOST_SHOWN = 300  # characters of a log line in an error message
# Variables that are not passed on: they would configure the child, whose arguments say all, or tie
# it to our supervisor.
SETTINGS_PREFIXES = ("KVD_", "INFERENCE_")
SUPERVISION = (
    *("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID"),
    *("STATE_DIRECTORY", "RUNTIME_DIRECTORY"),
)
# A child does not listen yet when we first connect. So retry soon (grpc waits 1 s and more by
# default), on a connection of our own, whose back-off no other channel has increased.
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 10),
    ("grpc.min_reconnect_backoff_ms", 10),
    ("grpc.max_reconnect_backoff_ms", 50),
)


class ChildFailedError(UnavailableError):
    """A child process has ended, did not become ready, or does not do its work.

    Attributes:
        code: exit code of the child, -N if signal N ended it; None: it is running.
        last_line: the last line of its log.
    """

    reason = "child_failed"

    def __init__(
        self, message: str, remedy: str, *, code: int | None = None, last_line: str = ""
    ) -> None:
        super().__init__(message, remedy)
        self.code = code
        self.last_line = last_line


class Spawned(Protocol):
    """The used part of subprocess.Popen."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    @property
    def returncode(self) -> Any:
        """The exit code, as of the last poll()."""
        ...

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        ...

    def wait(self) -> int:
        """Wait for its end, blocking, and return the exit code."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""
        ...


class ChildProcess:
    """One `python -m MODULE ARGUMENTS` with its log in a file; may be started again.

    Args:
        name: its name, for messages.
        arguments: the module and its arguments.
        address: gRPC target of its health service, "unix:/…".
        log_path: file for its output.
        environ: variables of its environment besides ours.
        credentials: token or certificate for its address.

    Attributes:
        name: its name, for messages.
        address: gRPC target whose health says whether it is ready, "unix:/…".
        ready_s: seconds of the last start, from exec to SERVING.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str | Path],
        address: str,
        log_path: Path,
        environ: Mapping[str, str] = MappingProxyType({}),
        credentials: ClientCredentials | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.ready_s = 0.0
        self._arguments = arguments
        self._log_path = log_path
        self._environ = environ
        self._credentials = credentials
        self._process: Spawned | None = None

    async def start(self) -> None:
        """Start the child and wait until it serves.

        Raises:
            ChildFailedError: it ends, or neither serves nor computes for READY_DEADLINE_S.
        """
        started_s = time.perf_counter()
        with self._log_path.open("ab") as log:
            self._process = self._spawn(log.fileno())
        serving = asyncio.ensure_future(self._until_serving())
        ended = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() or serving.exception() is not None:
                raise self._failure(ended.result() if ended.done() else None)
        finally:
            serving.cancel()
            ended.cancel()
            await asyncio.gather(serving, ended, return_exceptions=True)
        self.ready_s = time.perf_counter() - started_s

    async def _until_serving(self) -> None:
        """Wait until the child serves, as long as it keeps computing.

        Raises:
            TimeoutError: it has computed next to nothing for READY_DEADLINE_S, or is not ready
                after READY_ROUNDS of that.
        """
        for _ in range(READY_ROUNDS):
            used_s = self.cpu_s()
            try:
                await wait_serving(self.address, self._credentials)
            except TimeoutError:
                if self.cpu_s() - used_s < BUSY_CPU_S:
                    raise
            else:
                return
        raise TimeoutError

    def send_signal(self, number: signal.Signals) -> None:
        """Send the child a signal; `wait` returns if this ends it."""
        if self._process is not None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End the child with SIGKILL, so that it can save nothing."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """End the child with SIGTERM, or with SIGKILL if that takes more than STOP_DEADLINE_S."""
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._end(signal.SIGTERM)
        except TimeoutError:
            await self.kill()

    async def wait(self) -> int:
        """Wait until the child ends, and return its exit code; 0 at once if it is not started."""
        if self._process is None or self._process.poll() is not None:
            return 0 if self._process is None else self._process.returncode
        has_ended, loop = asyncio.Event(), asyncio.get_running_loop()
        pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(pidfd, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    async def wait_for_failure(self) -> ChildFailedError:
        """Wait until the child ends, and return the error that describes its unexpected end."""
        return self._failure(await self.wait())

    def cpu_s(self) -> float:
        """Return the seconds of processor time the child has used, in steps of 10 ms."""
        return float(sum(self._running().cpu_times()[:2]))

    def rss_bytes(self) -> int:
        """Return the child's resident memory in bytes."""
        return int(self._running().memory_info().rss)

    def peak_rss_bytes(self) -> int:
        """Return the child's peak resident memory in bytes."""
        status = Path(f"/proc/{self._running().pid}/status").read_text()
        (kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(kib) << 10

    @property
    def _whole_environ(self) -> dict[str, str]:
        return {**_environment(os.environ), **self._environ}

    def _spawn(self, log: int) -> Spawned:
        """Start the process, which also ends if we are killed, with its output in the log."""
        # Not asyncio's subprocesses: uvloop forks, which is unsafe with gRPC's threads.
        return subprocess.Popen(
            (
                *(sys.executable, "-I", "-S", bound_child.__file__, str(os.getpid())),
                # -P: do not import modules from the current directory.
                *(sys.executable, "-P", "-m", *self._arguments),
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=self._whole_environ,
            start_new_session=True,  # Ctrl-C reaches only us: we end the child in good order
        )

    def _running(self) -> psutil.Process:
        if self._process is None:
            raise ChildFailedError(f"{self.name} has not been started", "start it first")
        return psutil.Process(self._process.pid)

    async def _end(self, signal_number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal_number)
            await self.wait()

    def _failure(self, code: int | None) -> ChildFailedError:
        """Return the error that describes how the child failed, with its last log line."""
        what = "is running, but does not answer"
        if code is not None and code < 0:
            what = f"was ended by {signal.Signals(-code).name}"
        elif code is not None:
            what = f"ended with exit code {code}"
        lines = self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        last = lines[-1][:MOST_SHOWN] if lines else ""
        return ChildFailedError(
            f"{self.name} {what} ({last or 'its log is empty'})",
            f"read its log, {self._log_path}",
            code=code,
            last_line=last,
        )


async def wait_serving(address: str, credentials: ClientCredentials | None = None) -> None:
    """Wait until the server at `address` exists and its health is SERVING.

    Raises:
        TimeoutError: that does not happen within READY_DEADLINE_S.
    """
    async with (
        asyncio.timeout(READY_DEADLINE_S),
        aio_channel_of(address, credentials, CHANNEL_OPTIONS) as channel,
    ):
        # Watch, not Check: the server sends each change of its state, so no polling is needed.
        changes = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), wait_for_ready=True
        )
        async for change in changes:
            if change.status == health_pb2.HealthCheckResponse.SERVING:
                return


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without settings and the supervisor's variables."""
    return {
        name: value
        for name, value in ours.items()
        if name not in SUPERVISION and not name.startswith(SETTINGS_PREFIXES)
    }
