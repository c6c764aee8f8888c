"""The SSD fails (no space, input/output errors): kvd serves from DRAM, reports it, and recovers.

The daemon runs in the test's own process, because faults are an argument of it; sockets, files and
arena are real.
"""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvd.config import DramSettings, Settings, SsdSettings
from kvd.daemon import Daemon
from kvd.tiers.faults import NoFaults
from shared.children.child_process import wait_serving
from shared.config.reload import fixed_settings
from tests.kvd_polling import all_clean, eventually, reader_stats
from tests.processes import KvdProcess
from tests.synthetic_engine import attached_engine, key_of

TOKENS = list(range(100, 150))
OTHER_TOKENS = list(range(1100, 1150))


class FaultPlan(NoFaults):
    """Fails reads or writes with an errno while one is set."""

    def __init__(self) -> None:
        self.read_errno = 0
        self.write_errno = 0
        self.num_failures = 0

    def before_read(self, extent: int) -> None:
        """See kvd.tiers.faults.Faults."""
        self._fail(self.read_errno)

    def before_write(self, extent: int) -> None:
        """See kvd.tiers.faults.Faults."""
        self._fail(self.write_errno)

    def _fail(self, number: int) -> None:
        if number:
            self.num_failures += 1
            raise OSError(number, "injected")


@asynccontextmanager
async def _daemon(
    directory: Path, faults: FaultPlan, dram: int = 1 << 20
) -> AsyncIterator[KvdProcess]:
    """Run a daemon in this process; yield a stand-in for the process that has its directories."""
    where = KvdProcess(directory)
    settings = Settings(
        runtime_dir=where.runtime_dir,
        state_dir=where.state_dir,
        dram=DramSettings(bytes=dram, keep="none"),
        ssd=SsdSettings(bytes=4 << 20),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(Daemon(fixed_settings(settings), faults).run(stop))
    try:
        await wait_serving(f"unix:{where.runtime_dir}/operator.sock")
        yield where
    finally:
        stop.set()
        await running


async def _ssd_state(kvd: KvdProcess) -> str:
    """Return why the SSD tier is degraded, or ""."""
    _, ssd = (await reader_stats(kvd)).layouts[0].tiers
    return ssd.degraded_reason


@pytest.mark.parametrize(("number", "reason"), [(errno.ENOSPC, "full"), (errno.EIO, "transient")])
async def test_failing_writes_degrade_the_tier(tmp_path: Path, number: int, reason: str) -> None:
    """Sessions stay in DRAM while writes fail; once writes work everything reaches the SSD."""
    faults = FaultPlan()
    async with _daemon(tmp_path, faults) as kvd, attached_engine(kvd.runtime_dir) as engine:
        faults.write_errno = number
        await engine.store(key_of("a"), TOKENS)
        await eventually(lambda: _ssd_state(kvd), reason)
        load = await engine.load(key_of("a"), TOKENS)
        assert (load.num_tokens, load.tiers) == (50, {"dram"})
        faults.write_errno = 0
        await all_clean(kvd)
        assert await _ssd_state(kvd) == ""
    async with _daemon(tmp_path, faults) as kvd, attached_engine(kvd.runtime_dir) as engine:
        assert (await engine.load(key_of("a"), TOKENS)).tiers == {"ssd"}


async def test_failing_writes_do_not_fail_stores(tmp_path: Path) -> None:
    """With a full disk and a full arena stores take the place of the coldest sessions."""
    faults = FaultPlan()
    faults.write_errno = errno.ENOSPC
    async with (
        _daemon(tmp_path, faults, dram=10 * 8192) as kvd,
        attached_engine(kvd.runtime_dir) as engine,
    ):
        for number in range(6):
            tokens = [token + 1000 * number for token in TOKENS]
            assert await engine.store(key_of(f"s{number}"), tokens) == 50
            assert (await engine.load(key_of(f"s{number}"), tokens)).num_tokens == 50


async def test_failing_reads_are_misses_and_keep_the_block(tmp_path: Path) -> None:
    """A read error cuts the answer; when reads work again the same blocks are loaded."""
    faults = FaultPlan()
    async with _daemon(tmp_path, faults) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("a"), TOKENS)
        await all_clean(kvd)
    async with _daemon(tmp_path, faults) as kvd, attached_engine(kvd.runtime_dir) as engine:
        faults.read_errno = errno.EIO
        failed = await engine.load(key_of("a"), TOKENS)
        assert (failed.num_tokens, failed.miss_reason) == (0, "read_error")
        assert (await reader_stats(kvd)).layouts[0].counters["read_errors"] >= 1
        faults.read_errno = 0
        assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 50


async def test_a_read_error_leaves_other_sessions_alone(tmp_path: Path) -> None:
    """What is in DRAM is served while the device fails."""
    faults = FaultPlan()
    async with _daemon(tmp_path, faults) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("a"), TOKENS)
        await all_clean(kvd)
    async with _daemon(tmp_path, faults) as kvd, attached_engine(kvd.runtime_dir) as engine:
        await engine.store(key_of("b"), OTHER_TOKENS)
        faults.read_errno = errno.EIO
        assert (await engine.load(key_of("a"), TOKENS)).num_tokens == 0
        assert (await engine.load(key_of("b"), OTHER_TOKENS)).num_tokens == 50
