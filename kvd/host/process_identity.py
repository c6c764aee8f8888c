"""Identities of processes that stay valid when pids are reused, and watches of processes (D10).

A pid alone may belong to another process by the time it is looked up. A pidfd names one process for
good, but does not outlive kvd. The pid together with the time at which the process was started
does: in one boot, no two processes have both in common.
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

SO_PEERPIDFD = 77  # Linux 6.5; the socket module does not have it yet
INSTANCE_BYTES = 16
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_STARTTIME_FIELD = 19  # in /proc/PID/stat, counted behind the command: field 22 in proc(5)


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of one client object inside one process.

    Attributes:
        pid: the process; 0 if it is in a foreign PID namespace: a later kvd cannot find it again.
        start_ticks: start of the process, in clock ticks since boot.
        instance: random id of the client object, INSTANCE_BYTES long; empty if it has sent none.
    """

    pid: int
    start_ticks: int
    instance: bytes


NO_PROCESS = ProcessIdentity(0, 0, b"")


def start_ticks_of(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; 0 if it does not exist.

    Raises:
        OSError: it cannot be looked up, because no descriptor is left.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    fields = text.rpartition(")")[2].split()  # a command may contain spaces and parentheses
    return int(fields[_STARTTIME_FIELD]) if len(fields) > _STARTTIME_FIELD else 0


def process_state(pid: int) -> str:
    """Return the state of a process, for people: "sleeping", "stopped", …, or "gone"."""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def process_name(pid: int) -> str:
    """Return the name of a process; "" if kvd may not see it."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""


class ProcessWatch:
    """Watches one process by its pidfd, on the event loop.

    Attributes:
        pid: the process.
        start_ticks: as in ProcessIdentity.
        is_dead: whether the process is dead; set before `on_death` is called.
    """

    def __init__(self, pid: int, pidfd: int) -> None:
        """Take ownership of `pidfd`.

        Raises:
            OSError: no descriptor is left to look the process up.
        """
        self.pid = pid
        try:
            self.start_ticks = start_ticks_of(pid)
        except OSError:
            os.close(pidfd)
            raise
        # Checked after /proc was read: if the process still lives, /proc was about this one.
        self.is_dead = _has_ended(pidfd)
        self._pidfd = pidfd
        self._on_death: Callable[[], None] = lambda: None

    def start(self, on_death: Callable[[], None]) -> None:
        """Call `on_death` once when the process dies; a second call replaces the first one's."""
        self._on_death = on_death
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_death_event)

    def kill(self) -> bool:
        """Send SIGKILL; return False if the process is dead already.

        Raises:
            PermissionError: the process is another user's.
        """
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
            with contextlib.suppress(RuntimeError):  # no event loop runs any more
                asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _on_death_event(self) -> None:
        self.is_dead = True
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._on_death()


def watch_peer(sock: socket.socket, pid: int) -> ProcessWatch | None:
    """Watch the process that has connected a Unix socket.

    The kernel knows that process for certain (SO_PEERPIDFD), even in a foreign PID namespace.

    Args:
        sock: the connected socket.
        pid: the peer's pid; 0: in a foreign PID namespace.

    Returns:
        The watch; None if the process is dead or cannot be watched.

    Raises:
        OSError: no descriptor is left. Such a peer must not be served: its slots could be given
            to other engines while it writes.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(pidfd, False)
    except OSError as error:
        if error.errno in _OUT_OF_DESCRIPTORS:
            raise
        if error.errno != errno.ENOPROTOOPT or not pid:  # ENOPROTOOPT: an older kernel
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error_too:
            if error_too.errno in _OUT_OF_DESCRIPTORS:
                raise
            return None
    return ProcessWatch(pid, pidfd)


def watch_identity(identity: ProcessIdentity) -> ProcessWatch | None:
    """Watch a process that is known from earlier; return None if it is dead."""
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
