"""What a supervisor receives."""

import os
import socket

import pytest

from shared.process import systemd


@pytest.mark.parametrize("abstract", [False, True])
def test_states_arrive(tmp_path, abstract):
    """Each state is a line of one datagram, at a path or an abstract address."""
    address = f"@ca-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(address.replace("@", "\0", 1))
        systemd.notify(systemd.READY, "STATUS=fine", environ={"NOTIFY_SOCKET": address})
        assert supervisor.recv(100) == b"READY=1\nSTATUS=fine"


def test_a_reload_begins_with_the_time(tmp_path):
    """systemd waits for the READY that comes after it, and for no earlier one."""
    first, second = systemd.reloading(), systemd.reloading()
    begin = "RELOADING=1\nMONOTONIC_USEC="
    assert first.startswith(begin)
    assert int(first.removeprefix(begin)) <= int(second.removeprefix(begin))


def test_nobody_listens(tmp_path):
    """Outside systemd, or when it is gone, nothing happens."""
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        systemd.notify(systemd.READY, environ=environ)
        assert not systemd.send("X", (), environ, 1.0)


def test_watchdog_interval():
    """Half of what is allowed, if it is meant for this process."""
    ours = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    assert systemd.watchdog_interval_s(ours) == 1.5
    assert systemd.watchdog_interval_s({**ours, "WATCHDOG_PID": "1"}) is None
    assert systemd.watchdog_interval_s({}) is None
