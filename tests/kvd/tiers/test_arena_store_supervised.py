"""Arenas that a supervisor keeps while kvd is down, as systemd's fd store does."""

import fcntl
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest

from kvd.host.sealed_memory import SEALS
from kvd.tiers.faults import NoFaults
from kvd.tiers.journal import HEADER_BYTES, Journal, unpack_header
from tests.synthetic_engine import small_layout

LAYOUT = small_layout()


# One run of a kvd under a supervisor: adopts its arena or creates one, prints its contents.
SUPERVISED = """
import os, sys
from pathlib import Path
from kvd.core.records.entries import CommittedSlot
from kvd.tiers.arena_store import ArenaOptions, ArenaStore
from tests.synthetic_engine import small_layout
layout = small_layout()
store = ArenaStore(ArenaOptions(keep="fdstore"), Path(sys.argv[1]), 4)
kept = store.find().get(layout.fingerprint)
adoption = store.adopt(layout, kept) if kept else None
arena = adoption.arena if adoption else store.create(layout, 4)
content = bytes(arena.slots.slot(1)[:4]).hex()
arena.slots.slot(1)[:4] = b"kept"
print("KVD", arena.arena_id, arena.epoch, content, flush=True)
if sys.stdin.readline() == "end":
    arena.close()
    print("KVD closed", flush=True)
"""


class Supervisor:
    """Keeps descriptors by name as systemd does, and starts kvds with them."""

    def __init__(self, directory):
        self.stored = {}
        self.directory = directory
        self.address = str(directory / "notify")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.address)
        self.sock.setblocking(False)

    def listen(self):
        """Receive what was sent so far."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.sock, 1000, 4)
            except BlockingIOError:
                return
            lines = dict(line.split("=", 1) for line in data.decode().split("\n"))
            if lines.get("FDSTOREREMOVE") == "1" and lines["FDNAME"] in self.stored:
                os.close(self.stored.pop(lines["FDNAME"]))
            if lines.get("FDSTORE") == "1":
                self.stored[lines["FDNAME"]] = fds[0]

    def start(self):
        """Start a kvd; return it and its line of output."""
        names, fds = list(self.stored), list(self.stored.values())

        def announce():
            for number, fd in enumerate(fds):
                os.dup2(fd, 50 + number)
            for number in range(len(fds)):
                os.dup2(50 + number, 3 + number)
            os.environ["LISTEN_PID"] = str(os.getpid())
            command = [sys.executable, "-c", SUPERVISED, str(self.directory)]
            os.execv(sys.executable, command)  # noqa: S606  # never returns to Popen

        environ = {"NOTIFY_SOCKET": self.address, "LISTEN_FDS": str(len(fds))}
        environ["LISTEN_FDNAMES"] = ":".join(names)
        before = dict(os.environ)
        os.environ.update(environ)
        try:
            process = subprocess.Popen(
                ["/bin/true"],
                preexec_fn=announce,  # noqa: PLW1509  # no thread of the test holds a lock
                close_fds=False,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            os.environ.clear()
            os.environ.update(before)
        while not (line := process.stdout.readline()).startswith("KVD"):
            assert line, "it has ended"
        self.listen()
        return process, line.split()[1:]

    def close(self):
        for fd in self.stored.values():
            os.close(fd)
        self.sock.close()


@pytest.fixture
def supervisor(tmp_path):
    made = Supervisor(tmp_path)
    yield made
    made.close()


def test_dram_survives_a_kill_under_a_supervisor(supervisor):
    """Descriptors are in the store; after SIGKILL a new process finds the old bytes."""
    first, (arena_id, epoch, content) = supervisor.start()
    assert content == "00000000"
    assert sorted(supervisor.stored) == [
        f"kvd-{LAYOUT.fingerprint}-journal",
        f"kvd-{LAYOUT.fingerprint}-slots",
    ]
    first.kill()
    first.communicate()
    second, facts = supervisor.start()
    assert facts == [arena_id, str(int(epoch) + 1), b"kept".hex()]
    output, _ = second.communicate("end")
    assert "KVD closed" in output
    supervisor.listen()
    assert not supervisor.stored
    third, facts = supervisor.start()
    assert facts[0] != arena_id
    third.communicate("end")


def test_half_of_an_arena_in_the_store_is_removed(supervisor):
    """The process creates a new one under the same names."""
    first, (arena_id, _, _) = supervisor.start()
    first.kill()
    first.communicate()
    os.close(supervisor.stored.pop(f"kvd-{LAYOUT.fingerprint}-journal"))
    second, facts = supervisor.start()
    assert facts[0] != arena_id
    assert len(supervisor.stored) == 2
    second.communicate("end")


@pytest.mark.parametrize(
    ("seals", "is_adopted"),
    [
        pytest.param(SEALS, True, id="sealed", marks=pytest.mark.long),
        pytest.param(0, False, id="not sealed", marks=pytest.mark.long),
        pytest.param(fcntl.F_SEAL_GROW, False, id="may shrink"),
        pytest.param(fcntl.F_SEAL_SHRINK, False, id="may grow", marks=pytest.mark.long),
    ],
)
def test_unsealed_memory_is_not_adopted(supervisor, seals, is_adopted):
    """An engine could truncate it, although everything else of it is right."""
    first, (arena_id, _, _) = supervisor.start()
    first.kill()
    first.communicate()
    slots, journal = (f"kvd-{LAYOUT.fingerprint}-{part}" for part in ("slots", "journal"))
    other = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(other, os.fstat(supervisor.stored[slots]).st_size)
    if seals:
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, seals)
    os.close(supervisor.stored[slots])
    supervisor.stored[slots] = other
    # The header names the memory of its slots, which is another one now: that alone would suffice.
    header = unpack_header(os.pread(supervisor.stored[journal], HEADER_BYTES, 0))
    header = replace(header, slots_inode=os.fstat(other).st_ino)
    written = Journal(supervisor.stored[journal], LAYOUT, header.num_slots, NoFaults())
    written.write_header(header, written.epoch)
    second, facts = supervisor.start()
    assert (facts[0] == arena_id) == is_adopted
    second.communicate("end")
