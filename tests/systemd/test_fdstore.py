"""Under a real systemd, with the shipped unit: when the DRAM tier survives.

The engine runs throughout, re-attaches by itself and checks every byte that it loads.
"""

import signal

import pytest

from tests.systemd.container import NEXT_VERSION, engine_inside

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

NAMES = tuple(f"s{number}" for number in range(20))
COMPLETE = [50] * len(NAMES)
FROM_DRAM = [(50, ["dram"])] * len(NAMES)
FROM_SSD = [(50, ["ssd"])] * len(NAMES)
PRESERVES = 254  # the first systemd with FileDescriptorStorePreserve=


async def arena_of(container):
    """Return (arena id, epoch)."""
    (layout,) = (await container.stats())["layouts"]
    return layout["arena"]["arena_id"], int(layout["arena"]["epoch"])


async def test_a_started_unit_is_ready(container):
    """`systemctl start` returns when kvd answers; the first engine's arena goes to the fd store."""
    assert (await container.stats())["version"]
    async with engine_inside(container):
        assert await container.property("NFileDescriptorStore") == "2"


async def test_sigkill_keeps_dram(container):
    """systemd restarts kvd, and every session is loaded from the same memory."""
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        mapped, (arena_id, epoch) = await engine.attached(1), await arena_of(container)
        pid = await container.property("MainPID")
        await container.run("kill", "-KILL", pid)
        await container.until_replaced(pid)
        assert await engine.attached(2) == mapped
        assert await engine.load(*NAMES) == FROM_DRAM
        assert await arena_of(container) == (arena_id, epoch + 1)
    assert await container.property("NRestarts") == "1"


async def test_sigkill_keeps_what_is_in_dram_only(container):
    """Nothing is lost without an SSD tier, either."""
    await container.configure(KVD_SSD__BYTES="0")
    await container.run("systemctl", "restart", "kvd")
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        pid = await container.property("MainPID")
        await container.run("kill", "-KILL", pid)
        await container.until_replaced(pid)
        await engine.attached(2)
        assert await engine.load(*NAMES) == FROM_DRAM


async def test_restart_keeps_dram(container):
    """Twice: sessions stored between the restarts are kept, too."""
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES[:10]) == COMPLETE[:10]
        await container.run("systemctl", "restart", "kvd")
        await engine.attached(2)
        assert await engine.store(*NAMES[10:]) == COMPLETE[10:]
        await container.run("systemctl", "restart", "kvd")
        await engine.attached(3)
        assert await engine.load(*NAMES) == FROM_DRAM
        assert await container.property("NFileDescriptorStore") == "2"


async def test_upgrade_keeps_dram(container):
    """A restart into another release, installed elsewhere, takes over the memory."""
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        await container.install_next()
        await container.run("systemctl", "restart", "kvd")
        await engine.attached(2)
        assert (await container.stats())["version"] == NEXT_VERSION
        assert await engine.load(*NAMES) == FROM_DRAM


async def test_stop_and_start_keeps_ssd(container):
    """A stop closes the fd store: sessions are found on SSD, and the memory is free."""
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        await container.run("systemctl", "stop", "kvd")
        assert await container.property("NFileDescriptorStore") == "0"
        await container.run("systemctl", "start", "kvd")
        await engine.attached(2)
        assert await engine.load(*NAMES) == FROM_SSD


async def test_preserved_store_keeps_dram_over_stop_and_start(container):
    """With FileDescriptorStorePreserve=yes a stop keeps DRAM, where systemd supports the key."""
    version = await container.systemd_version()
    await container.configure("FileDescriptorStorePreserve=yes")
    await container.run("systemctl", "restart", "kvd")
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        await container.run("systemctl", "stop", "kvd")
        await container.run("systemctl", "start", "kvd")
        await engine.attached(2)
        loads = await engine.load(*NAMES)
    print(f"systemd {version}: a stop with FileDescriptorStorePreserve=yes keeps {loads[0][1]}")
    assert loads == (FROM_DRAM if version >= PRESERVES else FROM_SSD)


async def test_watchdog_replaces_a_stuck_kvd(container):
    """A kvd that does not answer is killed and restarted, and DRAM is kept."""
    await container.configure("WatchdogSec=2s", "TimeoutAbortSec=1s")
    await container.run("systemctl", "restart", "kvd")
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        pid = await container.property("MainPID")
        await container.run("kill", f"-{signal.SIGSTOP.name.removeprefix('SIG')}", pid)
        await container.until_replaced(pid)
        await engine.attached(2)
        assert await engine.load(*NAMES) == FROM_DRAM
