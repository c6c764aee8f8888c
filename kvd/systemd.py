"""What systemd wants to hear from a Type=notify service. Does nothing outside systemd.

*Source:* sd_notify(3), sd_watchdog_enabled(3).
"""

import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"
WATCHDOG = "WATCHDOG=1"


def notify(*states: str, environ: Mapping[str, str] = os.environ) -> None:
    """Send states such as READY or "STATUS=…"; a supervisor that is not listening is ignored."""
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # abstract namespace
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            sock.sendto("\n".join(states).encode(), address)
        except OSError:
            return


def watchdog_interval_s(environ: Mapping[str, str] = os.environ) -> float | None:
    """Half of what WatchdogSec= allows between two WATCHDOG messages; None without a watchdog."""
    period_us = environ.get("WATCHDOG_USEC", "")
    ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(period_us) / 2e6 if period_us.isdigit() and ours else None
