"""Python processes that start with their imports done: forks of a process that has done them.

Importing torch and transformers takes a service seconds, and tests start dozens. The fork runs
what `python -m MODULE` runs, in its own process, session and environment.

`WarmPython` is the side of the tests; `main` runs in the process that forks. One connection is one
child: its request goes in, pid and then exit code come out. A child that has ended is reaped when
its connection is closed, so that its pid is not reused until then.
"""

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

MAX_REQUEST = 1 << 20


class WarmProcess:
    """A child of the forking process; offers the part of Popen that the tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid = int(self._receive())
        self._code: int | None = None

    @property
    def returncode(self) -> int | None:
        """Return the exit code that poll() finds."""
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code if it has ended; negative: the signal."""
        if self._code is None:
            self._connection.setblocking(False)
            try:
                self._ended(self._receive())
            except BlockingIOError:
                self._connection.setblocking(True)
        return self._code

    def wait(self) -> int:
        """Wait until it ends; blocks."""
        if self._code is None:
            self._ended(self._receive())
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _receive(self) -> bytes:
        packet = self._connection.recv(64)
        assert packet, "the forking process has ended"
        return packet

    def _ended(self, packet: bytes) -> None:
        self._code = int(packet)
        self._connection.close()


class WarmPython:
    """One forking process, started when it is first needed; ends with this process.

    Args:
        imports: modules that it imports before it forks.
        lent: descriptor from another test process, whose forking process is then used.
    """

    def __init__(self, *imports: str, lent: int | None = None) -> None:
        self._imports = imports
        self._listening = None if lent is None else socket.socket(fileno=lent)
        self._process: subprocess.Popen[bytes] | None = None

    def lent(self) -> int:
        """Return the descriptor that lets a child process use this forking process, too."""
        return self._started().fileno()

    def spawn(
        self,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        output: int,
        commands: int | None = None,
    ) -> WarmProcess:
        """Run `python -m MODULE ARGUMENTS`; blocks while the imports are done for the first one.

        Args:
            module: its `main()` is called.
            arguments: of the command line.
            environ: its complete environment.
            output: descriptor for stdout and stderr.
            commands: descriptor for stdin, over which it may answer, too; None: no stdin.
        """
        listening = self._started()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = json.dumps([module, list(arguments), dict(environ), str(Path.cwd())]).encode()
        with theirs:
            fds = [theirs.fileno(), output, *(() if commands is None else (commands,))]
            socket.send_fds(listening, [request], fds)
        return WarmProcess(ours)

    def _started(self) -> socket.socket:
        if self._listening is not None:
            return self._listening
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
        with theirs:
            command = (sys.executable, "-m", "tests.warm_python", str(theirs.fileno()))
            self._process = subprocess.Popen(
                (*command, *self._imports), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
        self._listening = ours
        atexit.register(self._end)
        return ours

    def _end(self) -> None:
        assert self._listening is not None
        assert self._process is not None
        self._listening.close()
        self._process.wait()


AnyProcess: TypeAlias = WarmProcess | subprocess.Popen[bytes]


async def wait_ended(process: AnyProcess) -> int:
    """Wait until a process ends, without blocking the loop."""
    if process.poll() is None:
        has_ended, loop = asyncio.Event(), asyncio.get_running_loop()
        pidfd = os.pidfd_open(process.pid)
        loop.add_reader(pidfd, has_ended.set)
        try:
            await has_ended.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
    return process.wait()


# ------------------------------------------------------------------------ the process that forks


class _Children:
    """Children and the connections that report their ends."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._running: set[int] = set()

    def end(self) -> None:
        """Kill all children when the tests' process has ended in any way."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)

    def add(self, pid: int, connection: socket.socket) -> None:
        """Report a child's pid now, and its end later."""
        connection.send(str(pid).encode())
        self._running.add(pid)
        pidfd = os.pidfd_open(pid)
        self.selector.register(pidfd, selectors.EVENT_READ, (self._ended, pid, pidfd, connection))
        self.selector.register(connection, selectors.EVENT_READ, (self._left, pid, connection))

    def _ended(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        self.selector.unregister(pidfd)
        os.close(pidfd)
        self._running.discard(pid)
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert info is not None
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        if connection.fileno() < 0:
            os.waitpid(pid, 0)
            return
        with contextlib.suppress(BrokenPipeError):  # no client waits; `_left` is called next
            connection.send(str(code).encode())

    def _left(self, pid: int, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        os.waitpid(pid, os.WNOHANG)


def main() -> None:
    """Import, then fork for each request, until the requests end."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests' process handles Ctrl-C
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # imported objects stay: a child's collections need not copy their pages
    gc.enable()
    children = _Children()
    children.selector.register(requests, selectors.EVENT_READ, None)
    while True:
        for key, _ in children.selector.select():
            if key.data is not None:
                answer, *arguments = key.data
                answer(*arguments)
                continue
            packet, fds, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
            if not packet:
                children.end()
                return
            pid = os.fork()
            if pid == 0:
                _run(packet, *fds[1:])
            for fd in fds[1:]:
                os.close(fd)
            children.add(pid, socket.socket(fileno=fds[0]))


def _run(packet: bytes, output: int, commands: int | None = None) -> None:
    """Become the module's command; do not return."""
    module, arguments, environ, directory = json.loads(packet)
    os.setsid()
    os.chdir(directory)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if commands is not None:
        os.dup2(commands, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    sys.argv = [module, *arguments]
    code = 0
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter does at its end
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
