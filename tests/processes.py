"""Real daemons for tests: started, stopped and killed, with deadlines instead of sleeps."""

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from kvd.cli.main import main
from shared.children.child_process import wait_serving
from shared.process.runtime_dir import OPERATOR_SOCKET
from tests.warm_python import AnyProcess, WarmPython, wait_ended

EXIT_S = 60.0
DRAM = "64MB"  # of each layout, unless a test has a size of its own
# What kvd imports at start: see tests/warm_python.py.
KVD = WarmPython(
    "kvd.cli.main",
    "kvd.cli.serve",
    "kvd.daemon",
    "tests.faulty_kvd",
    "tests.driven_engine",
    "pydantic.type_adapter",
    "uvloop",
)


class KvdProcess:
    """`kvd serve` in its own directory, which it keeps over restarts.

    Args:
        directory: short enough for socket paths, as tmp_path is.
        flags: additional options of `kvd serve`.
        keep: setting dram.keep: "none" where a restart is to find everything on SSD.
        environ: settings in environment variables.
    """

    def __init__(
        self,
        directory: Path,
        flags: Sequence[str] = (),
        keep: str = "file",
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.runtime_dir = directory / "run"
        self.state_dir = directory / "state"
        self.log_path = directory / "kvd.log"
        self._flags = list(flags)
        self._environment = {
            **os.environ,
            "KVD_DRAM__KEEP": keep,
            # Not /dev/shm: what a killed kvd leaves there would outlive the test.
            "KVD_DRAM__DIRECTORY": str(directory / "shm"),
            # Not a quarter of the machine's memory, of which it would write every page.
            "KVD_DRAM__BYTES": DRAM,
            **environ,
        }
        self._process: AnyProcess | None = None

    @property
    def pid(self) -> int:
        """Return the pid of the running process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and return when its health check passes."""
        await self.spawn()
        assert self._process is not None
        exited = asyncio.ensure_future(wait_ended(self._process))
        ready = asyncio.ensure_future(wait_serving(f"unix:{self.runtime_dir / OPERATOR_SOCKET}"))
        await asyncio.wait((exited, ready), return_when=asyncio.FIRST_COMPLETED)
        exited.cancel()
        if not ready.done():
            ready.cancel()
            raise AssertionError(f"kvd exited at its start:\n{self.log()}")
        ready.result()

    async def spawn(self) -> None:
        """Start it and return at once."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        options = (
            *("--log-level", "debug", "--log-format", "json"),
            *("--runtime-dir", str(self.runtime_dir), "--state-dir", str(self.state_dir)),
            *self._flags,
        )
        module, *arguments = self._command()
        with self.log_path.open("ab") as log:
            self._process = self._run(module, (*arguments, *options), log.fileno())

    def _run(self, module: str, arguments: Sequence[str], log: int) -> AnyProcess:
        """Start `python -m MODULE ARGUMENTS`."""
        return KVD.spawn(module, arguments, self._environment, log)

    def _command(self) -> list[str]:
        """Return the module to run, and its first arguments."""
        return ["kvd.cli.main", "serve"]

    async def exit_code(self) -> int:
        """Wait until it ends; return its exit code."""
        assert self._process is not None
        async with asyncio.timeout(EXIT_S):
            return await wait_ended(self._process)

    async def stop(self) -> int:
        """End it with SIGTERM, as a supervisor would, and return its exit code."""
        return await self.signal(signal.SIGTERM)

    async def kill(self) -> None:
        """End it with SIGKILL."""
        await self.signal(signal.SIGKILL)

    async def signal(self, number: signal.Signals) -> int:
        """Send a signal, and wait until the process has ended by it."""
        if self._process is None or self._process.returncode is not None:
            return 0
        self._process.send_signal(number)
        return await self.exit_code()

    def log(self) -> str:
        """Return the contents of its stderr over all starts."""
        return self.log_path.read_text(encoding="utf-8") if self.log_path.exists() else ""


@asynccontextmanager
async def running_kvd(
    directory: Path,
    *flags: str,
    keep: str = "file",
    environ: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[KvdProcess]:
    """Run a kvd that serves; stop it at the end."""
    kvd = KvdProcess(directory, flags, keep, environ)
    try:
        await kvd.start()
        yield kvd
    finally:
        await kvd.stop()


async def run_cli(*arguments: str) -> tuple[int, str, str]:
    """Run a `kvd` command and return its exit code, stdout and stderr.

    The daemon is another process; the command runs in this one, which saves its start-up. Only one
    command may run at a time.
    """
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, list(arguments))
    code = ended.value.code
    return code if isinstance(code, int) else 0, stdout.getvalue(), stderr.getvalue()


async def pipe_to_reader(path: Path) -> int:
    """Open a named pipe for writing as soon as somebody reads it."""
    async with asyncio.timeout(EXIT_S):
        while True:
            with suppress(OSError):
                return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            await asyncio.sleep(0.01)
