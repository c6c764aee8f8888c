"""Under a real systemd: properties of the shipped units, before anything is stored."""

import re

import pytest

from tests.systemd.machine import VENV

pytestmark = [pytest.mark.systemd, pytest.mark.asyncio(loop_scope="session")]

SERVICES = ("kvd.service", "kvd-remote.service", "inference-svc@demo.service")
MOST_EXPOSURE = 2.0  # of 10, by `systemd-analyze security`
SOCKETS = {
    "engine.sock": "kvd kvd-engine 660",
    "data.sock": "kvd kvd-engine 660",
    "files.sock": "kvd kvd-operator 660",
    "operator.sock": "kvd kvd-operator 660",
    "reader.sock": "kvd kvd-reader 660",
}


async def test_systemd_reports_no_problems(container):
    """`systemd-analyze verify` reports nothing about any of the units."""
    units = (*SERVICES, "cachedattention.slice")
    assert await container.tried("systemd-analyze", "verify", "--man=no", *units) == (0, "")


async def test_units_are_hardened(container):
    """The exposure of each service is low, by systemd's own score."""
    version = await container.systemd_version()
    for unit in SERVICES:
        said = await container.run("systemd-analyze", "security", "--no-pager", unit)
        exposure = float(re.search(r"Overall exposure level for \S+: ([\d.]+)", said)[1])
        print(f"systemd {version}: exposure of {unit}: {exposure}")
        assert exposure <= MOST_EXPOSURE


async def test_hardening_is_in_force(container):
    """The kernel's view of kvd's process: no capability, no new privilege, filtered calls."""
    pid = await container.property("MainPID")
    status = container.path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert {int(fields[f"Cap{which}"], 16) for which in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {0}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    groups = await container.run("id", "--name", "--groups", "kvd")
    assert set(groups.split()) == {
        "kvd",
        "kvd-config",
        "kvd-engine",
        "kvd-operator",
        "kvd-reader",
    }


async def test_kvd_cannot_write_elsewhere(container):
    """In kvd's own view of the file system, only its two directories and /tmp are writable."""
    pid = await container.property("MainPID")
    mounts = container.path(f"/proc/{pid}/mountinfo").read_text()
    options = {line.split()[4]: line.split()[5].split(",") for line in mounts.splitlines()}
    assert "ro" in options["/"]
    for directory in ("/run/kvd", "/var/lib/kvd", "/tmp"):  # noqa: S108
        assert "rw" in options[directory], directory


async def test_limits_are_in_force(container):
    """No core is written, memory may be locked, and the unit is in the slice."""
    pid = await container.property("MainPID")
    limits = container.path(f"/proc/{pid}/limits").read_text()
    # Requested; a container may not get more than the host's own limit.
    assert await container.property("LimitMEMLOCK") == "infinity"
    assert re.search(r"Max core file size +0 +0", limits)
    assert await container.property("Slice") == "cachedattention.slice"
    assert await container.property("FileDescriptorStoreMax") == "64"
    assert int(await container.property("MemoryHigh")) > 0


async def test_each_socket_belongs_to_its_group(container):
    """One socket per role: 0660, kvd's, with the group that may use it."""
    for name, expected in SOCKETS.items():
        assert await container.run("stat", "--format=%U %G %a", f"/run/kvd/{name}") == expected


async def test_groups_decide_what_users_may_do(container):
    """Users without a group get nothing, readers may look, operators may act."""
    kvd = f"{VENV}/bin/kvd"
    for name, groups in {"stranger": "", "reader": "kvd-reader", "chief": "kvd-operator"}.items():
        await container.run("useradd", "--system", "--user-group", f"--groups={groups}", name)
    code, said = await container.tried(kvd, "ls", "--json", user="stranger")
    assert code != 0
    assert '"sessions"' not in said
    assert (await container.tried(kvd, "ls", "--json", user="reader"))[0] == 0
    code, said = await container.tried(kvd, "flush", "--all", "--yes", user="reader")
    assert code == 7, said
    assert "become a member of group kvd-operator" in said
    assert (await container.tried(kvd, "flush", "--all", "--yes", user="chief"))[0] == 0


async def test_directories_of_state_are_private(container):
    """Only the services can read conversations and secrets."""
    assert await container.run("stat", "--format=%U %a", "/var/lib/kvd") == "kvd 700"
    assert await container.run("stat", "--format=%U %a", "/etc/credstore") == "root 700"


async def test_installation_enables_nothing(container):
    """The preset leaves the decision to the machine's operator."""
    await container.run("systemctl", "preset", "kvd.service")
    try:
        assert (await container.tried("systemctl", "is-enabled", "kvd"))[1] == "disabled"
    finally:
        await container.run("systemctl", "enable", "kvd")


async def test_the_journal_has_kvds_events(container):
    """Lines are JSON, under the daemon's name, with its unit and a priority."""
    entries = await container.journal("--unit=kvd", "--boot", "--priority=info")
    ready = [entry for entry in entries if '"kvd_ready"' in entry["MESSAGE"]]
    assert ready
    assert {entry["SYSLOG_IDENTIFIER"] for entry in ready} == {"kvd"}
    assert {entry["PRIORITY"] for entry in ready} == {"6"}
    assert all(entry["MESSAGE"].startswith("{") for entry in ready)
