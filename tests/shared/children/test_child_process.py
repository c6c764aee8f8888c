"""Children that do not serve: waited for while they work, named when they do not."""

import pytest

from shared.children import child_process
from shared.children.child_process import ChildFailedError, ChildProcess

WORKING = ("timeit", "-n", "1", "-r", "1", "for number in range(30_000_000): pass")
IDLE = ("http.server", "--bind", "127.0.0.1", "0")


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """Nobody waits for two minutes here."""
    monkeypatch.setattr(child_process, "READY_DEADLINE_S", 0.2)
    monkeypatch.setattr(child_process, "READY_ROUNDS", 1000)
    monkeypatch.setattr(child_process, "BUSY_CPU_S", 0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(WORKING, "ended with exit code 0"), (IDLE, "is running, but does not answer")],
)
async def test_a_child_is_waited_for_as_long_as_it_works(tmp_path, arguments, message):
    """One that works is given its time, and here ends; one that is idle is given up."""
    address = f"unix:{tmp_path}/nobody.sock"
    child = ChildProcess("it", arguments, address, tmp_path / "it.log")
    try:
        with pytest.raises(ChildFailedError, match=message):
            await child.start()
    finally:
        await child.kill()
