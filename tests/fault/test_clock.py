"""Clocks that jump while kvd is down expire no session unless the time has really passed.

Within one boot kvd's clock is the kernel's boot time; over a reboot it is the saved time plus
the time that has passed by the wall clock. A reboot is simulated by changing the saved clock in
kvd's index.
"""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvd.host.clock import META_NAME
from tests.fault.ledger import Ledger, everything_verifies, nothing_leaks
from tests.faulty_kvd import FaultyKvd
from tests.kvd_polling import all_clean, reader_stats
from tests.synthetic_engine import attached_engine, small_layout

DAY_S = 86400
NAMES = ("s1", "s2", "s3")
SIZES = {"KVD_DRAM__BYTES": "1MB", "KVD_SSD__BYTES": "4MB", "KVD_SSD__RESERVE_BYTES": "0"}


class ShiftedKvd(FaultyKvd):
    """A kvd that sees another boot time than the tests do."""

    offset_s = 0

    async def stop(self) -> int:
        """Stop kvd, which is the only child of the started process."""
        if self.offset_s:
            os.kill(_only_child(self.pid), signal.SIGTERM)
            return await self.exit_code()
        return await super().stop()

    def _run(self, module, arguments, log):
        if not self.offset_s:
            return super()._run(module, arguments, log)
        shift = ("unshare", "--time", f"--boottime={self.offset_s}", "--fork", "--kill-child")
        command = (*shift, sys.executable, "-m", module, *arguments)
        environment, quiet = self._environment, subprocess.DEVNULL
        return subprocess.Popen(command, env=environment, stdin=quiet, stdout=log, stderr=log)


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii"))


async def _store_sessions(kvd, engine) -> Ledger:
    ledger = Ledger()
    for name in NAMES:
        await ledger.grow(engine, name, 50)
    await all_clean(kvd)
    return ledger


@pytest.mark.parametrize(
    ("wall_s", "served"),
    [
        (-3650 * DAY_S, True),
        pytest.param(-DAY_S, True, marks=pytest.mark.long),
        pytest.param(3600, True, marks=pytest.mark.long),
        (8 * DAY_S, False),
    ],
    ids=["10 years back", "1 day back", "1 hour on", "8 days on"],
)
async def test_wall_clock_over_a_reboot(new_kvd, outcome, wall_s, served):
    """A wall clock set back costs nothing; a time longer than the TTL is believed."""
    kvd = new_kvd(SIZES, keep="none")
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, small_layout()) as engine:
        ledger = await _store_sessions(kvd, engine)
        assert await kvd.stop() == 0
        _reboot(kvd, wall_s)
        await kvd.start()
        await engine.client.wait_attached(30)
        found = await ledger.judge(engine, kvd)
        outcome(found)
        assert set(found) == {"ssd" if served else "missed"}
        counters = (await reader_stats(kvd)).layouts[0].counters
        assert counters["sessions_expired"] == (0 if served else len(NAMES))
        await everything_verifies(kvd)
        await nothing_leaks(kvd)
    assert await kvd.stop() == 0


def _reboot(kvd, wall_s) -> None:
    """Change the index to another boot's clock, saved `wall_s` seconds ago by the wall clock."""
    db = sqlite3.connect(kvd.state_dir / "manifest.db")
    (text,) = db.execute("SELECT value FROM meta WHERE name = ?", (META_NAME,)).fetchone()
    saved = json.loads(text) | {"boot_id": "another", "wall_ns": time.time_ns() - wall_s * 10**9}
    db.execute("UPDATE meta SET value = ? WHERE name = ?", (json.dumps(saved), META_NAME))
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "offset_s",
    [pytest.param(DAY_S, marks=pytest.mark.long), 3650 * DAY_S],
    ids=["1 day", "10 years"],
)
async def test_a_boot_time_that_jumps(new_kvd, outcome, offset_s):
    """A suspended machine ages its sessions; a boot time that goes back again does no harm."""
    if not shutil.which("unshare") or _unshare(offset_s):
        pytest.skip("needs a time namespace: run it as root")
    kvd = new_kvd(SIZES, keep="none", kind=ShiftedKvd)
    kvd.offset_s = offset_s
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, small_layout()) as engine:
        ledger = await _store_sessions(kvd, engine)
        await kvd.stop()
        kvd.offset_s = 0  # the boot time goes back by this much
        await kvd.start()
        await engine.client.wait_attached(30)
        back = await ledger.judge(engine, kvd)
        assert set(back) == {"ssd"}
        await kvd.stop()
        kvd.offset_s = offset_s
        await kvd.start()
        await engine.client.wait_attached(30)
        on = await ledger.judge(engine, kvd)
        assert set(on) == {"ssd" if offset_s < 7 * DAY_S else "missed"}
        outcome(f"back: {dict(back)}; on: {dict(on)}")
    await kvd.stop()


def _unshare(offset_s: int) -> int:
    command = ["unshare", "--time", f"--boottime={offset_s}", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode
