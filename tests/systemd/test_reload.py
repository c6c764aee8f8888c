"""Under a real systemd: settings that change while kvd runs, and secrets from systemd."""

import json

import pytest
import pytest_asyncio

from tests.systemd.container import engine_inside
from tests.systemd.machine import VENV

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

SETTINGS = "/etc/kvd/kvd.toml"
KEY = "/etc/credstore/kvd-key"
KVD = f"{VENV}/bin/kvd"


@pytest_asyncio.fixture(loop_scope="session")
async def settings(container):
    """Return the settings file, and restore it afterwards."""
    path = container.path(SETTINGS)
    before = path.read_text()
    yield path
    container.path(SETTINGS).write_text(before)


async def running(container, key: str) -> str:
    """Return a running kvd's value of a setting."""
    shown = json.loads(await container.run(KVD, "config", "show", "--running", "--json"))
    return str(shown[key]["value"])


async def test_reload_reads_the_settings_again(container, settings):
    """`systemctl reload` applies a changed file in the same process, without a restart."""
    pid = await container.property("MainPID")
    settings.write_text(settings.read_text().replace('level = "info"', 'level = "debug"'))
    async with engine_inside(container) as engine:
        assert await engine.store("s1") == [50]
        await container.run("systemctl", "reload", "kvd")
        assert await running(container, "log.level") == "debug"
        assert await engine.load("s1") == [(50, ["dram"])]
    assert await container.property("MainPID") == pid
    assert await container.property("SubState") == "running"


async def test_a_reload_with_a_bad_file_fails_and_changes_nothing(container, settings):
    """`systemctl reload` fails, the journal has the reason, and kvd continues as before."""
    pid = await container.property("MainPID")
    before = await running(container, "sessions.default_ttl")
    broken = settings.read_text().replace("max_engines = 64", "max_engines = -1")
    settings.write_text(broken.replace('default_ttl = "7d"', 'default_ttl = "1d"'))
    code, _ = await container.tried("systemctl", "reload", "kvd")
    assert code != 0
    assert await container.property("MainPID") == pid
    assert await running(container, "sessions.default_ttl") == before
    entries = await container.journal("--unit=kvd", "--boot")
    assert any("max_engines" in entry["MESSAGE"] for entry in entries)
    assert (await container.stats())["version"]


async def test_the_key_comes_from_the_credential_store(container):
    """A key that only root can read encrypts the SSD tier; without it kvd does not start."""
    await container.run(KVD, "key", "new", KEY)
    try:
        await container.configure(KVD_ENCRYPTION__KEY_FILE="kvd-key")
        await container.run("systemctl", "restart", "kvd")
        assert await container.run("stat", "--format=%U %a", KEY) == "root 600"
        async with engine_inside(container) as engine:
            assert await engine.store("s1") == [50]
            await container.run("systemctl", "stop", "kvd")  # the content of DRAM is dropped, too
            await container.run("systemctl", "start", "kvd")
            await engine.attached(2)
            assert await engine.load("s1") == [(50, ["ssd"])]
        await container.run("rm", KEY)
        code, _ = await container.tried("systemctl", "restart", "kvd")
        assert code != 0
        assert await container.property("ExecMainStatus") == "78"
    finally:
        await container.tried("rm", "--force", KEY)
