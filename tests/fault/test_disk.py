"""A disk that is full, slow or broken: DRAM serves, no wrong byte is written, and kvd recovers."""

import errno
import os
import subprocess
from contextlib import contextmanager, suppress

import pytest

from tests.fault.ledger import Ledger, everything_verifies, nothing_leaks
from tests.kvd_polling import all_clean, eventually, reader_stats, until_kept
from tests.synthetic_engine import attached_engine, key_of, small_layout

LAYOUT = small_layout()
NAMES = [f"s{number}" for number in range(20)]
SIZES = {
    "KVD_DRAM__BYTES": "4MB",
    "KVD_SSD__BYTES": "3MB",
    "KVD_SSD__RESERVE_BYTES": "0",
    "KVD_SSD__SEGMENT_BYTES": "128KB",
}


@contextmanager
def small_disk(directory, num_bytes):
    """Mount a file system of which `num_bytes` are free."""
    directory.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, check=False).returncode:
        pytest.skip("needs to mount a file system: run it as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)  # noqa: S607


async def is_degraded(kvd) -> bool:
    """Return whether kvd reports the SSD tier as degraded."""
    return any(tier.degraded for tier in (await reader_stats(kvd)).layouts[0].tiers)


async def has_room(kvd) -> bool:
    """Return whether kvd has noticed that there is room on the disk again."""
    ssd = (await reader_stats(kvd)).layouts[0].tiers[1]
    return ssd.capacity_bytes > 1 << 20


def forget_dram(kvd) -> None:
    """Remove the arena, as a reboot does."""
    for path in (kvd.log_path.parent / "shm").rglob("*.*"):
        path.unlink()


async def test_disk_full(new_kvd, outcome):
    """Stores use DRAM, a kill on the full disk loses no more; new room makes all of it durable."""
    kvd = new_kvd(SIZES)
    with small_disk(kvd.state_dir, 3 << 20):
        await kvd.start()
        async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
            ledger = Ledger()
            await ledger.grow(engine, "s99", 50)
            await all_clean(kvd)
            ballast = kvd.state_dir / "ballast"
            _fill(ballast)
            for name in NAMES:
                await ledger.grow(engine, name, 50)
            full = await ledger.judge(engine, kvd)
            assert full["dram"] == len(NAMES) + 1
            assert await kvd.kill_it()
            await kvd.start()
            await engine.client.wait_attached(30)
            killed = await ledger.judge(engine, kvd)
            assert killed["dram"] > 0
            ballast.unlink()
            await eventually(lambda: has_room(kvd), wanted=True)
            for name in NAMES:
                await ledger.grow(engine, name, 20)
            assert await kvd.stop() == 0
            forget_dram(kvd)
            await kvd.start()
            await engine.client.wait_attached(30)
            mended = await ledger.judge(engine, kvd)
            outcome(f"full: {dict(full)}; killed: {dict(killed)}; mended: {dict(mended)}")
            assert set(mended) == {"ssd"}
            await everything_verifies(kvd)
            await nothing_leaks(kvd)
        assert await kvd.stop() == 0


def _fill(path):
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 4096):
            with suppress(OSError):
                while file.write(bytes(size)):
                    pass


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=lambda n: errno.errorcode[n])
async def test_every_write_fails(new_kvd, outcome, number):
    """The tier is degraded, DRAM serves, a kill keeps its contents; then the disk is repaired."""
    kvd = new_kvd(SIZES)
    kvd.faults = {"write_errno": number}
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        ledger = Ledger()
        for name in NAMES:
            await ledger.grow(engine, name, 50)
        await eventually(lambda: is_degraded(kvd), wanted=True)
        assert set(await ledger.judge(engine, kvd)) == {"dram"}
        for name in NAMES:
            await until_kept(kvd, name)
        assert await kvd.kill_it()
        kvd.faults = {}
        await kvd.start()
        await engine.client.wait_attached(30)
        found = await ledger.judge(engine, kvd)
        outcome(found)
        await all_clean(kvd)
        assert not await is_degraded(kvd)
        await everything_verifies(kvd)
        await nothing_leaks(kvd)
    assert await kvd.stop() == 0


async def test_every_read_fails(new_kvd, outcome):
    """Reads become counted misses, and no block is dropped for it."""
    kvd = new_kvd(SIZES, keep="none")
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        ledger = Ledger()
        for name in NAMES[:5]:
            await ledger.grow(engine, name, 50)
        await all_clean(kvd)
        await kvd.kill()
        kvd.faults = {"read_errno": errno.EIO}
        await kvd.start()
        await engine.client.wait_attached(30)
        loads = [await engine.load(key_of(name), ledger.tokens[name]) for name in NAMES[:5]]
        assert {(load.num_tokens, load.miss_reason) for load in loads} == {(0, "read_error")}
        assert (await reader_stats(kvd)).layouts[0].counters["read_errors"] > 0
        await kvd.kill()
        kvd.faults = {}
        await kvd.start()
        await engine.client.wait_attached(30)
        found = await ledger.judge(engine, kvd)
        outcome(f"{len(loads)} missed; then {dict(found)}")
        assert set(found) == {"ssd"}
        await nothing_leaks(kvd)
    assert await kvd.stop() == 0


async def test_slow_disk(new_kvd, outcome):
    """Every read and write takes 20 ms longer: stores do not wait for it, nothing is lost."""
    slots = str(12 * LAYOUT.block_bytes)
    kvd = new_kvd(SIZES | {"KVD_DRAM__BYTES": slots}, keep="none")
    kvd.faults = {"delay_s": 0.02}
    await kvd.start()
    async with attached_engine(kvd.runtime_dir, LAYOUT) as engine:
        ledger = Ledger()
        for name in NAMES[:8]:
            await ledger.grow(engine, name, 50)
        await all_clean(kvd)
        await kvd.kill()
        await kvd.start()
        await engine.client.wait_attached(30)
        found = await ledger.judge(engine, kvd)
        outcome(found)
        assert set(found) == {"ssd"}
        await nothing_leaks(kvd)
    assert await kvd.stop() == 0
