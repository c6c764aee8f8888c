"""Which process a peer is: a pid alone may belong to another one by the time it is looked up (D10).

A pidfd names a process for good, but does not outlive kvd. What does is the pid together with the
time the process was started: on one boot, no two processes share both.
"""

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not know it yet
INSTANCE_BYTES = 16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_STARTTIME_FIELD = 19  # of /proc/PID/stat, counted after the command: field 22 in proc(5)


@dataclass(frozen=True)
class ProcessIdentity:
    """One connection object inside one process.

    Attributes:
        pid: 0 if the process lives in a foreign PID namespace: a later kvd cannot find it again.
        start_ticks: when it was started, in clock ticks since boot.
        instance: random, chosen by the client: INSTANCE_BYTES, or empty from one that has none.
    """

    pid: int
    start_ticks: int
    instance: bytes


NOBODY = ProcessIdentity(0, 0, b"")


def start_ticks_of(pid: int) -> int:
    """Return when a process was started; 0 if it is not there.

    Raises:
        OSError: nobody knows: no descriptor is left to look with.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = text.rpartition(")")[2].split()  # a command may contain spaces and parentheses
    return int(fields[_STARTTIME_FIELD]) if len(fields) > _STARTTIME_FIELD else 0


def process_state(pid: int) -> str:
    """What a process does, for people: "sleeping", "stopped", …; "gone" if it is not there."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def process_name(pid: int) -> str:
    """Name of a process; empty if it is not ours to see."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""


class ProcessWatch:
    """Watches one process by its pidfd, from the event loop.

    Attributes:
        pid: the number of the process.
        start_ticks: as in ProcessIdentity.
        is_dead: set before `on_death` is called.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        """Take over `pidfd`.

        Raises:
            OSError: no descriptor is left to look with.
        """
        self.pid = pid
        try:
            self.start_ticks = start_ticks_of(pid)
        except OSError:
            os.close(pidfd)
            raise
        self.is_dead = _has_ended(pidfd)  # after the look into /proc: so that was the same process
        self._pidfd = pidfd
        self._on_death: Callable[[], None] = lambda: None

    def start(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` once when the process dies; a second start replaces the first."""
        self._on_death = on_death
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def kill(self) -> bool:
        """Send SIGKILL; False if the process is dead already."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Stop watching."""
        if self._pidfd >= 0:
            with contextlib.suppress(RuntimeError):  # no loop runs any more: nothing is watched
                asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _died(self) -> None:
        self.is_dead = True
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._on_death()


def watch_peer(sock: socket.socket, pid: int) -> ProcessWatch | None:
    """Watch the process that connected a Unix socket; None if it is dead or cannot be watched.

    The kernel knows that process for certain, even one of a foreign PID namespace (pid 0).

    Raises:
        OSError: no descriptor is left to watch with. Such a peer must not be served: its slots
            would be given to others while it writes.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise
        if error.errno != errno.ENOPROTOOPT or not pid:  # an older kernel knows pids only
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error_too:
            if error_too.errno in _OUT_OF_DESCRIPTORS:
                raise
            return None
    return ProcessWatch(pid, pidfd)


def watch_identity(identity: ProcessIdentity) -> ProcessWatch | None:
    """Watch a process known from earlier; None if it does not live any more."""
    if not identity.pid:
        return None
    try:
        watch = ProcessWatch(identity.pid, os.pidfd_open(identity.pid))
    except OSError:
        return None
    if watch.is_dead or watch.start_ticks != identity.start_ticks:
        watch.close()
        return None
    return watch


def _has_ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
