"""Under a real systemd: kvd-remote.service, which follows kvd and moves its sessions."""

import json

import pytest

from tests.systemd.container import VENV, engine_inside

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

UNIT = "kvd-remote"
STORE = "/srv/sessions"
DROP_IN = f"/etc/systemd/system/{UNIT}.service.d/test.conf"
NAMES = tuple(f"s{number}" for number in range(8))
COMPLETE = [50] * len(NAMES)


@pytest.fixture
def drop_in(container):
    """Write the unit's drop-in, which lets it write to the store."""
    file = container.path(DROP_IN)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"[Service]\nReadWritePaths={STORE}\n")
    return file


async def follow(container, **settings):
    """Set a directory as the store in kvd's settings, and start the follower."""
    await container.run("rm", "-rf", STORE)
    await container.run("install", "--directory", f"--owner={UNIT}", "--mode=0700", STORE)
    url = {"KVD_REMOTE__URL": f"file://{STORE}"}
    await container.configure(**url, **{f"KVD_REMOTE__{k}": v for k, v in settings.items()})
    await container.run("systemctl", "restart", "kvd")
    await container.run("systemctl", "restart", UNIT)


async def pushed_sessions(container):
    """Return the sessions in the store."""
    listed = await container.run(f"{VENV}/bin/kvd", "remote", "ls", f"file://{STORE}", "--json")
    return sorted(one["session"] for one in json.loads(listed)["sessions"])


async def test_a_stop_pushes_the_rest(container, drop_in):
    """It stays up through a restart of kvd, for which nothing is pushed."""
    assert drop_in.exists()
    await follow(container, WRITE="drain")
    pid = await container.property("MainPID", UNIT)
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE
        await container.run("systemctl", "restart", "kvd")
        await engine.attached(2)
        assert await container.property("MainPID", UNIT) == pid
        assert await pushed_sessions(container) == []
        await container.run("systemctl", "stop", UNIT)
    assert await container.property("Result", UNIT) == "success"
    assert await pushed_sessions(container) == list(NAMES)


async def test_a_killed_follower_continues(container, drop_in):
    """systemd restarts it, and it pushes what was stored meanwhile."""
    assert drop_in.exists()
    await follow(container, WRITE="all", QUIET="0s")
    async with engine_inside(container) as engine:
        pid = await container.property("MainPID", UNIT)
        await container.run("kill", "-KILL", pid)
        assert await engine.store(*NAMES) == COMPLETE
        await container.until_replaced(pid, UNIT)

        async def are_there():
            return await pushed_sessions(container) == list(NAMES)

        await container.until(are_there)
    await container.run("systemctl", "stop", UNIT)


async def test_a_read_only_store_does_not_affect_kvd(container, drop_in):
    """kvd is ready, its journal has the reason, and sessions are stored and loaded."""
    drop_in.write_text("")  # the file system is read-only
    await follow(container, WRITE="all", QUIET="0s")
    async with engine_inside(container) as engine:
        assert await engine.store(*NAMES) == COMPLETE

        async def is_told():
            entries = await container.journal(f"--unit={UNIT}")
            return any("remote_store_fails" in entry["MESSAGE"] for entry in entries)

        await container.until(is_told)
        assert [num_tokens for num_tokens, _ in await engine.load(*NAMES)] == COMPLETE
    assert await container.property("ActiveState", UNIT) == "active"
    await container.run("systemctl", "stop", UNIT)
