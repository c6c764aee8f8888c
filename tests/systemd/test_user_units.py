"""Under a real systemd: `kvd install-units --user`, the units of a user without root."""

import pytest
import pytest_asyncio

from tests.systemd.container import SIZES
from tests.systemd.machine import VENV

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

OWNER = "grace"
HOME = f"/home/{OWNER}"
KVD = f"{VENV}/bin/kvd"


@pytest_asyncio.fixture(loop_scope="session")
async def own(container):
    """Return a function that runs commands as a user with their own systemd."""
    await container.run("useradd", "--create-home", OWNER)
    uid = await container.run("id", "--user", OWNER)
    # What a login sets; there is no PAM module for it in the container.
    drop_in = container.path("/run/systemd/system/user@.service.d/test.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n")
    await container.run("systemctl", "daemon-reload")
    await container.run("systemctl", "start", f"user@{uid}")
    runtime = f"/run/user/{uid}"

    async def run(*command: str) -> str:
        environment = ("env", f"HOME={HOME}", f"XDG_RUNTIME_DIR={runtime}")
        code, said = await container.tried(*environment, *command, user=OWNER)
        assert code == 0, said
        return said

    yield run
    await container.run("systemctl", "stop", f"user@{uid}")


async def test_a_user_runs_kvd_beside_the_system_service(container, own):
    """It starts, answers, reloads and is removed, all in the user's directories."""
    await own(KVD, "install-units", "--user")
    drop_in = container.path(f"{HOME}/.config/systemd/user/kvd.service.d/test.conf")
    drop_in.parent.mkdir(parents=True, exist_ok=True)
    drop_in.write_text(
        "\n".join(["[Service]", *(f"Environment={k}={v}" for k, v in SIZES.items()), ""])
    )
    await own("systemctl", "--user", "daemon-reload")
    await own("systemctl", "--user", "start", "kvd")
    runtime = await own("sh", "-c", "echo $XDG_RUNTIME_DIR/kvd")
    theirs = await own("systemctl", "--user", "show", "--value", "--property=MainPID", "kvd")
    assert theirs != await container.property("MainPID")
    assert '"version"' in await own(KVD, "stats", "--json", "--runtime-dir", runtime)
    await own("systemctl", "--user", "reload", "kvd")
    assert await container.run("stat", "--format=%U %a", f"{HOME}/.local/state/kvd") == (
        f"{OWNER} 700"
    )
    await own("systemctl", "--user", "stop", "kvd")
    await own(KVD, "install-units", "--user", "--remove")
    drop_in.unlink()
    left = await container.run("find", f"{HOME}/.config", "-type", "f")
    assert not left
