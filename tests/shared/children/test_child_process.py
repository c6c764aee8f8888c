"""Children that do not serve: waited for while they work, named when they do not. And orphans."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from shared.children import child_process
from shared.children.child_process import ChildFailedError, ChildProcess

WORKING = ("timeit", "-n", "1", "-r", "1", "for number in range(30_000_000): pass")
IDLE = ("http.server", "--bind", "127.0.0.1", "0")

DEADLINE_S = 60.0
STARTS_ONE = """
import asyncio, sys
from pathlib import Path
from shared.children.child_process import ChildProcess
address, log = sys.argv[1:3]
asyncio.run(ChildProcess("it", sys.argv[3:], address, Path(log)).start())
"""


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Shorten the time of two minutes."""
    monkeypatch.setattr(child_process, "READY_DEADLINE_S", 0.2)
    monkeypatch.setattr(child_process, "READY_ROUNDS", 1000)
    monkeypatch.setattr(child_process, "BUSY_CPU_S", 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(WORKING, "ended with exit code 0"), (IDLE, "is running, but does not answer")],
)
async def test_a_child_is_waited_for_while_it_works(tmp_path, arguments, message):
    """A working one gets its time, and ends here; an idle one is given up."""
    address = f"unix:{tmp_path}/nobody.sock"
    child = ChildProcess("it", arguments, address, tmp_path / "it.log")
    try:
        with pytest.raises(ChildFailedError, match=message):
            await child.start()
    finally:
        await child.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent(tmp_path, number):
    """Also with one that is killed and can end nobody: nothing runs on that nobody knows of."""
    address, log = f"unix:{tmp_path}/nobody.sock", str(tmp_path / "it.log")
    parent = subprocess.Popen((sys.executable, "-c", STARTS_ONE, address, log, *IDLE))
    try:
        child = _child_of(parent.pid)
    finally:
        parent.send_signal(number)
        parent.wait()
    try:
        child.wait(DEADLINE_S)
    finally:
        if child.is_running():
            child.kill()


def _child_of(pid: int) -> psutil.Process:
    """The only child of a process, once it has one that runs what it is to run."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        for child in psutil.Process(pid).children():
            if child.cmdline()[1:3] == ["-P", "-m"]:
                return child
        time.sleep(0.01)
    raise AssertionError("no child was started")
