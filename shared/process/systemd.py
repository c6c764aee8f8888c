"""systemd: notifications of a Type=notify service, and its store of file descriptors (D4).

A service reports that it is ready, reloading, stopping, or still alive. Descriptors in the fd store
are returned after a restart, even after a crash. A full stop closes them, unless the unit has
FileDescriptorStorePreserve=yes. Outside of systemd these functions do nothing.

*Source:* sd_notify(3), sd_watchdog_enabled(3), sd_listen_fds(3), sd_pid_notify_with_fds(3).
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping, MutableMapping

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"
STORE_S = 1.0  # longest wait for a busy supervisor: a descriptor that it misses would be lost
FIRST_FD = 3  # SD_LISTEN_FDS_START
_LISTEN_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def notify(*states: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send states such as READY or "STATUS=…"; failures are ignored."""
    send("\n".join(states), (), environ, 0.0)


def reloading() -> str:
    """Return the state that begins a reload, with the current time in it; READY ends the reload."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return half of the interval that WatchdogSec= allows; None without a watchdog."""
    period_us = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(period_us) / 2e6 if period_us.isdigit() and ours else None


def send(message: str, fds: tuple[int, ...], environ: Mapping[str, str], timeout_s: float) -> bool:
    """Send one datagram, with descriptors; returns False if it was not taken in time."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(address)
            if fds:
                socket.send_fds(sock, [message.encode()], fds)
            else:
                sock.send(message.encode())
        except OSError:  # a timeout is one, too
            return False
    return True


def store_fds(fds: Mapping[str, int], environ: Mapping[str, str] = os.environ) -> bool:
    """Put descriptors into the fd store, by name; returns False if there is none.

    systemd silently drops descriptors beyond FileDescriptorStoreMax=.
    """
    # FDPOLL=0: systemd would drop descriptors that hang up. Memory files never do, and cannot be
    # polled.
    return all(
        send(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", (fd,), environ, STORE_S)
        for name, fd in fds.items()
    )


def remove_fds(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> None:
    """Remove descriptors from the fd store; unknown names are ignored."""
    for name in names:
        send(f"FDSTOREREMOVE=1\nFDNAME={name}", (), environ, STORE_S)


def stored_fds(environ: MutableMapping[str, str] = os.environ) -> dict[str, int]:
    """Take over the descriptors that an earlier process has stored, by name. The caller owns them.

    Children inherit neither the descriptors nor the variables that announce them; a second call
    finds none.
    """
    ours = environ.get("LISTEN_PID") == str(os.getpid())
    count = environ.get("LISTEN_FDS", "")
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    for variable in _LISTEN_VARIABLES:
        environ.pop(variable, None)
    if not ours or not count.isdigit():
        return {}
    stored: dict[str, int] = {}
    for index in range(int(count)):
        fd = FIRST_FD + index
        try:
            os.set_inheritable(fd, False)
        except OSError:  # announced, but not there
            continue
        name = names[index] if index < len(names) else ""
        if name in stored:  # systemd puts the newest of a name first
            os.close(fd)
        else:
            stored[name] = fd
    return stored
