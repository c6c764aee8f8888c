"""A driven engine (tests/driven_engine.py) that starts with its imports done."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.driven_engine import ANSWER_BACK, DrivenEngine
from tests.processes import KVD
from tests.warm_python import WarmProcess, wait_ended


class WarmEngine:
    """Such a process, forked from one with its imports done."""

    def __init__(
        self, process: WarmProcess, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader
    ) -> None:
        self._process = process
        self.stdin = stdin
        self.stdout = stdout
        self.pid = process.pid
        self.send_signal = process.send_signal

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        """Wait until it ends; return its exit code."""
        return await wait_ended(self._process)


@asynccontextmanager
async def driven_engine(runtime_dir: Path) -> AsyncIterator[DrivenEngine]:
    """Run an engine that is attached. It may be killed meanwhile."""
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = [str(runtime_dir), ANSWER_BACK]
        forked = KVD.spawn("tests.driven_engine", arguments, os.environ, 2, theirs.fileno())
    reader, writer = await asyncio.open_connection(sock=ours)
    process = WarmEngine(forked, writer, reader)
    engine = DrivenEngine(process)
    try:
        await engine.attached(1)
        yield engine
    finally:
        process.kill()
        await engine.end()
