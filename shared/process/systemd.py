"""Notifies systemd as a Type=notify service does: ready, reloading, stopping, still alive.

Does nothing outside systemd.

*Source:* sd_notify(3), sd_watchdog_enabled(3).
"""

import os
import socket
import time
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"


def notify(*states: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send states such as READY or "STATUS=…"; a supervisor that is not listening is ignored."""
    send("\n".join(states), (), environ, 0.0)


def reloading() -> str:
    """Return the state that begins a reload; READY ends it. Made anew for each: it has the time."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return half of what WatchdogSec= allows between two messages; None without a watchdog."""
    period_us = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(period_us) / 2e6 if period_us.isdigit() and ours else None


def send(message: str, fds: tuple[int, ...], environ: Mapping[str, str], timeout_s: float) -> bool:
    """Send one datagram, with descriptors; False if nobody has taken it in time."""
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
