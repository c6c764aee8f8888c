"""The commands of docs/operations.md for a new operator, run verbatim on a bare machine.

Only two words are changed: the machine has no network, so pip takes this tree's wheel in place of
the tree and its dependencies, and there is no sudo, so everything is run as root.
"""

import json
import re

import pytest
import pytest_asyncio

from tests.systemd.container import REPOSITORY, SOURCE

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

OPERATIONS = REPOSITORY / "docs" / "operations.md"
MOST_COMMANDS = 10
OPERATOR = "ada"
# Where files could be left behind, apart from systemd's own.
PLACES = ("/etc", "/opt", "/run", "/usr/local", "/var/lib")
OF_THE_SYSTEM = re.compile(
    r"/run/(systemd|log|lock|user|udev|dbus|initctl|utmp|mount|credentials|host|motd|shm|blkid|agetty)"
    r"|/var/lib/(systemd|private|dbus)|/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$"
    r"|/etc/\.?pwd\.lock|/(__pycache__|[^/]*\.pyc)"
)


def commands_under(heading: str) -> list[str]:
    """Return the commands of the first code block below a heading."""
    _, _, below = OPERATIONS.read_text().partition(f"\n{heading}\n")
    block = re.search(r"```sh\n(.*?)```", below, re.DOTALL)[1].replace("\\\n", " ")
    return [line for line in block.splitlines() if line.strip() and not line.startswith("#")]


async def type_command(machine, command: str) -> str:
    """Run one command in the source tree, as an operator with sudo."""
    command = command.replace("sudo ", "")
    pip = f"pip install --no-index --no-deps {machine.wheel}"
    command = re.sub(r"pip install .*'\.\[engine\]'", pip, command)
    script = f"export USER={OPERATOR}; cd {SOURCE}; {command}"
    return await machine.run("sh", "-ec", script)


async def files_of(machine) -> set[str]:
    """Return every path in places where something could be left behind."""
    found = await machine.run("find", *PLACES, "-xdev")
    return {path for path in found.splitlines() if not OF_THE_SYSTEM.search(path)}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def machine(bare):
    """Boot a machine with systemd and Python, and a user who operates the pair."""
    if not bare.has_torch:
        pytest.skip("this Python's packages do not fit the container's Python")
    await bare.run("useradd", "--create-home", OPERATOR)
    return bare


@pytest.fixture(scope="module")
def steps():
    """Return the machine's state before the first command; the first test fills it."""
    return {}


async def test_few_commands_lead_to_a_working_pair(machine, steps):
    """At most ten commands; then a turn is answered, and kvd has its session."""
    commands = commands_under("## First steps")
    assert len(commands) <= MOST_COMMANDS
    steps["before"] = await files_of(machine)
    said = {command: await type_command(machine, command) for command in commands}
    for number, (command, output) in enumerate(said.items(), 1):
        print(f"{number}. {command}\n{output}\n")
    sessions = json.loads(await machine.run("/opt/cachedattention/bin/kvd", "ls", "--json"))
    assert len(sessions["sessions"]) == 1
    assert await machine.property("ActiveState") == "active"
    assert await machine.property("ActiveState", "inference-svc@demo") == "active"


async def test_the_operator_needs_no_root(machine):
    """A member of the groups uses both services as an ordinary user."""
    kvd, inference = (f"/opt/cachedattention/bin/{name}" for name in ("kvd", "inference-svc"))
    assert (await machine.tried(kvd, "ls", user=OPERATOR))[0] == 0
    address = "unix:/run/inference-svc-demo/inference.sock"
    assert (await machine.tried(inference, "status", "--address", address, user=OPERATOR))[0] == 0


async def test_both_start_at_boot(machine):
    """Both are enabled, and start in order."""
    for unit in ("kvd", "inference-svc@demo"):
        assert (await machine.tried("systemctl", "is-enabled", unit))[1] == "enabled"


async def test_an_upgrade_keeps_settings_and_dram(machine):
    """The same commands with the next release: settings stay, the unit is new, DRAM is kept."""
    settings = machine.path("/etc/kvd/kvd.toml")
    changed = settings.read_text().replace('default_ttl = "7d"', 'default_ttl = "3d"')
    settings.write_text(changed)
    stored = json.loads(await machine.run("/opt/cachedattention/bin/kvd", "ls", "--json"))
    for command in commands_under("## Upgrading"):
        await type_command(machine, command)
    assert settings.read_text() == changed
    kept = json.loads(await machine.run("/opt/cachedattention/bin/kvd", "ls", "--json"))
    assert [s["session"] for s in kept["sessions"]] == [s["session"] for s in stored["sessions"]]
    assert await machine.property("NFileDescriptorStore") == "2"
    settings.write_text(changed.replace('default_ttl = "3d"', 'default_ttl = "7d"'))


async def test_uninstalling_leaves_nothing(machine, steps):
    """No unit, file, directory, user or group of the pair remains."""
    for command in commands_under("## Uninstalling"):
        await type_command(machine, command)
    left = await files_of(machine) - steps["before"]
    assert not left, sorted(left)[:20]
    for name in ("kvd", "inference", "kvd-engine", "kvd-operator", "kvd-reader"):
        assert (await machine.tried("getent", "group", name))[0] != 0, name
        assert (await machine.tried("getent", "passwd", name))[0] != 0, name
    assert (await machine.tried("systemctl", "cat", "kvd"))[0] != 0
