"""Notifications to a supervisor, and the descriptors that it keeps."""

import array
import os
import socket
import subprocess
import sys

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


def test_without_a_supervisor_nothing_is_sent(tmp_path):
    """Outside systemd, or when it is gone, nothing happens."""
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        systemd.notify(systemd.READY, environ=environ)
        assert not systemd.send("X", (), environ, 1.0)


def test_the_watchdog_interval():
    """Half of the allowed time, if it is meant for this process."""
    ours = {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    assert systemd.watchdog_interval_s(ours) == 1.5
    assert systemd.watchdog_interval_s({**ours, "WATCHDOG_PID": "1"}) is None
    assert systemd.watchdog_interval_s({}) is None


@pytest.fixture
def supervisor(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(30)
        yield sock


@pytest.fixture
def environ(tmp_path):
    return {"NOTIFY_SOCKET": str(tmp_path / "notify")}


def receive_message(supervisor):
    """Return one message, as lines, and its descriptors."""
    data, ancillary, _, _ = supervisor.recvmsg(1000, socket.CMSG_LEN(64))
    fds = [fd for _, _, raw in ancillary for fd in array.array("i", raw)]
    return data.decode().split("\n"), fds


def test_without_a_supervisor_no_descriptor_is_kept(tmp_path):
    """Outside systemd, or when it is gone, nothing is kept."""
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        systemd.remove_fds(["a"], environ)
        assert not systemd.store_fds({"a": 1}, environ)


def test_descriptors_are_sent_by_name(supervisor, environ):
    """One message each, and not polled; removal names them."""
    fd = os.memfd_create("kept")
    os.write(fd, b"content")
    assert systemd.store_fds({"kvd-a-slots": fd, "kvd-a-journal": fd}, environ)
    systemd.remove_fds(["kvd-a-slots"], environ)
    for name in ("kvd-a-slots", "kvd-a-journal"):
        lines, (received,) = receive_message(supervisor)
        assert lines == ["FDSTORE=1", f"FDNAME={name}", "FDPOLL=0"]
        assert os.pread(received, 7, 0) == b"content"
        os.close(received)
    assert receive_message(supervisor) == (["FDSTOREREMOVE=1", "FDNAME=kvd-a-slots"], [])
    os.close(fd)


# Adopts its descriptors; prints their contents, those a child inherits, and the rest.
ADOPTING = """
import os, subprocess, sys
from shared.process import systemd
fds = systemd.stored_fds()
for name in sorted(fds):
    print(name, os.pread(fds[name], 9, 0).decode())
print("again", systemd.stored_fds(), [v for v in os.environ if v.startswith("LISTEN")])
script = (
    "import os; print('child', 'LISTEN_FDS' in os.environ, flush=True);"
    "os.system('ls -l /proc/self/fd')"
)
answer = subprocess.run([sys.executable, "-c", script], close_fds=False, capture_output=True)
print("memfd" in answer.stdout.decode(), answer.stdout.decode().splitlines()[0])
"""


def run_with_fds(fds, names, pid="self"):
    """Start a process as systemd does: descriptors from 3 on, announced in its environment."""

    def announce():
        free = max(fds) + 1  # onwards: a worker that has run many tests may have any number open
        for number, fd in enumerate(sorted(fds), start=free):
            os.dup2(fd, number)
        for number in range(len(fds)):
            os.dup2(free + number, 3 + number)
            os.close(free + number)
        listen_pid = str(os.getpid()) if pid == "self" else pid
        environ = {**os.environ, "LISTEN_PID": listen_pid, "LISTEN_FDS": str(len(fds))}
        environ["LISTEN_FDNAMES"] = ":".join(names)
        command = [sys.executable, "-c", ADOPTING]
        os.execve(sys.executable, command, environ)  # noqa: S606

    # preexec_fn never returns: the process is replaced by the one that knows its own LISTEN_PID.
    process = subprocess.run(
        ["/bin/true"],
        preexec_fn=announce,
        close_fds=False,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.splitlines()


@pytest.fixture
def memfds():
    fds = []
    for number in range(3):
        fds.append(os.memfd_create("kept"))
        os.write(fds[-1], f"content {number}".encode())
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_new_process_adopts_its_descriptors(memfds):
    """By name; once; and its own children inherit neither them nor the variables."""
    lines = run_with_fds(memfds, ["kvd-a-slots", "kvd-a-journal", "stored"])
    assert lines == [
        "kvd-a-journal content 1",
        "kvd-a-slots content 0",
        "stored content 2",
        "again {} []",
        "False child False",
    ]


def test_of_two_descriptors_with_one_name_one_is_kept(memfds):
    """The first, which is the newest in systemd's list; the other is closed."""
    lines = run_with_fds(memfds, ["a", "a", "b"])
    assert lines[:2] == ["a content 0", "b content 2"]


def test_another_processs_descriptors_are_not_used(memfds):
    """An inherited LISTEN_PID says nothing about this process's descriptors."""
    lines = run_with_fds(memfds, ["a", "b", "c"], pid="1")
    assert lines[0] == "again {} []"


@pytest.mark.parametrize(
    "variables", [{}, {"LISTEN_FDS": "junk"}, {"LISTEN_FDS": "1000"}, {"LISTEN_FDNAMES": "a:b"}]
)
def test_invalid_announcements(variables):
    """Announced descriptors that do not exist are ignored."""
    script = (
        "import os; from shared.process import systemd;"
        "os.environ['LISTEN_PID'] = str(os.getpid());"
        "print(systemd.stored_fds())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout == "{}\n"
