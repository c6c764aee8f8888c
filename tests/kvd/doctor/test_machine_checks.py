"""The doctor's checks of the machine: each failure is provoked, and mended by its own advice."""

import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvd.config import AccessSettings, DramSettings, LimitSettings, Settings, SsdSettings
from kvd.doctor.finding import Finding, Level, worst
from kvd.doctor.guards import check_unit, limits_of_service
from kvd.doctor.machine import Machine, ProcessLimits, may_read
from kvd.doctor.memory import (
    check_cuda,
    check_huge_pages,
    check_kernel,
    check_locked_memory,
    check_memory,
    check_numa,
    check_shared_memory,
    check_swap,
    file_system_of,
)
from kvd.doctor.storage import check_descriptors, check_directories, check_state_disk
from shared.types.units import GIB, MIB

NOBODY = 65534
PIB = 1 << 50


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine with 8 GiB of memory, 4 available; tests change what its files say."""
    made = Machine(tmp_path / "proc", tmp_path / "sys")
    _write(made.proc / "meminfo", "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    _write(made.proc / "self/mounts", f"disk / ext4 rw 0 0\nshm {tmp_path}/shm tmpfs rw 0 0\n")
    _write(made.proc / "self/cgroup", "0::/kvd.slice/kvd.service\n")
    _write(made.sys / "kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never")
    (tmp_path / "shm").mkdir()
    return made


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _settings(tmp_path: Path, **dram: object) -> Settings:
    given: dict[str, object] = {"bytes": GIB, "directory": tmp_path / "shm", "keep": "file"}
    return Settings(
        runtime_dir=tmp_path / "run",
        state_dir=tmp_path / "state",
        dram=DramSettings(**(given | dram)),
        ssd=SsdSettings(bytes=64 * MIB, reserve_bytes=0),
    )


def _only(findings: Iterable[Finding], level: Level, *words: str) -> Finding:
    """Check that one finding is not OK and its line has these words; return it."""
    (found,) = [finding for finding in findings if finding.level is not Level.OK]
    assert found.level is level
    text = f"{found.what}: {found.remedy}"
    assert all(word in text for word in words), text
    assert "\n" not in text
    assert found.remedy
    return found


def _is_fine(findings: Iterable[Finding]) -> bool:
    return worst(list(findings)) is Level.OK


def test_more_dram_than_the_machine_has(tmp_path, machine):
    """Too large for the machine, or for the available memory: lower it."""
    check = lambda size: check_memory(_settings(tmp_path, bytes=size), machine)  # noqa: E731
    _only(check(9 * GIB), Level.PROBLEM, "9.0 GB", "8.0 GB", "lower dram.bytes")
    _only(check(5 * GIB), Level.WARNING, "4.0 GB", "lower dram.bytes")
    assert _is_fine(check(2 * GIB))


def test_more_dram_than_the_control_group_has(tmp_path, machine):
    """The lowest bound of all parent groups counts: raise it, or lower dram.bytes."""
    bound = machine.sys / "fs/cgroup/kvd.slice/memory.max"
    _write(bound, str(GIB))
    _write(machine.sys / "fs/cgroup/kvd.slice/kvd.service/memory.max", "max")
    settings = _settings(tmp_path, bytes=2 * GIB)
    _only(check_memory(settings, machine), Level.PROBLEM, "1.0 GB", "MemoryMax=")
    _write(bound, str(3 * GIB))
    assert _is_fine(check_memory(settings, machine))


def test_shared_memory_that_is_too_small(tmp_path, machine):
    """The tier does not fit: the line has the remount command that makes room."""
    _only(
        check_shared_memory(_settings(tmp_path, bytes=PIB), machine),
        Level.PROBLEM,
        "mount -o remount,size=1073741888M",
        "--shm-size",
    )
    assert _is_fine(check_shared_memory(_settings(tmp_path, bytes=MIB), machine))


def test_a_directory_that_is_not_shared_memory(tmp_path, machine):
    """A directory on a disk, or one that does not exist: name a tmpfs."""
    on_disk = _settings(tmp_path, bytes=MIB, directory=tmp_path)
    _only(check_shared_memory(on_disk, machine), Level.WARNING, "is on ext4", "on a tmpfs")
    missing = _settings(tmp_path, bytes=MIB, directory=tmp_path / "none")
    _only(check_shared_memory(missing, machine), Level.PROBLEM, 'dram.keep = "none"')
    advised = _settings(tmp_path, bytes=MIB, directory=tmp_path / "none", keep="none")
    assert _is_fine(check_shared_memory(advised, machine))


def test_missing_huge_pages(tmp_path, machine):
    """The line has the number of pages that the pool needs, and the kernel's switch."""
    settings = _settings(tmp_path, hugepages="on")
    _only(check_huge_pages(settings, machine), Level.PROBLEM, "sysctl vm.nr_hugepages=512")
    meminfo = machine.proc / "meminfo"
    pool = "HugePages_Total: 520\nHugePages_Free: 512\nHugepagesize: 2048 kB\n"
    plain = meminfo.read_text()
    _write(meminfo, plain + pool.replace("512", "500"))  # other processes use 20 of them
    _only(check_huge_pages(settings, machine), Level.PROBLEM, "sysctl vm.nr_hugepages=532")
    _write(meminfo, plain + pool)
    assert _is_fine(check_huge_pages(settings, machine))
    _write(meminfo, plain)
    assert _is_fine(check_huge_pages(_settings(tmp_path, hugepages="auto"), machine))
    switch = machine.sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    _write(switch, "always advise [never]")
    found = check_huge_pages(_settings(tmp_path), machine)
    _only(found, Level.WARNING, f"echo advise > {switch}")
    _write(switch, "always [advise] never")
    assert _is_fine(check_huge_pages(_settings(tmp_path), machine))


def test_memory_that_may_not_be_locked(tmp_path, machine):
    """Only on machines with a GPU, for users with a limit: raise it."""
    bound = ProcessLimits(8 * MIB, 1024, is_root=False)
    settings = _settings(tmp_path)
    assert _is_fine(check_locked_memory(settings, machine, bound))
    _write(machine.proc / "driver/nvidia/version", "NVRM version: 1")
    found = check_locked_memory(settings, machine, bound)
    _only(found, Level.PROBLEM, "LimitMEMLOCK=infinity", "ulimit -l unlimited", "memlock=-1")
    assert _is_fine(check_locked_memory(settings, machine, replace(bound, locked_bytes=None)))


def test_a_missing_numa_node():
    """The line says how to list the nodes."""
    _only(check_numa(1000), Level.PROBLEM, "1000", "numactl --hardware", '"any"')
    assert _is_fine(check_numa(None))


def test_unusable_gpus(tmp_path, machine):
    """Without devices, without permission, without a driver: each has its own remedy."""
    dev = tmp_path / "dev"
    dev.mkdir()
    assert _is_fine(check_cuda(machine, dev))
    (dev / "nvidia0").touch(mode=0o600)
    _only(check_cuda(machine, dev), Level.PROBLEM, "modprobe nvidia")
    _write(machine.proc / "driver/nvidia/version", "NVRM version: 1")
    _only(check_cuda(machine, dev), Level.PROBLEM, "--gpus all")
    (dev / "nvidiactl").touch(mode=0o600)
    _only(check_cuda(machine, dev), Level.WARNING, "nvidia-modprobe")
    (dev / "nvidia-uvm").touch()
    assert _is_fine(check_cuda(machine, dev))
    (dev / "nvidiactl").chmod(0)
    with _as_nobody(tmp_path):
        _only(check_cuda(machine, dev), Level.PROBLEM, "may not open", "to the group")


def test_this_kernel_suffices():
    """Processes can be watched and memory sealed where these tests run: kvd needs it, too."""
    assert _is_fine(check_kernel())


def test_directories_that_kvd_refuses(tmp_path):
    """Open to others, not a directory, too long for sockets; then as advised."""
    settings = _settings(tmp_path)
    assert _is_fine(check_directories(settings))
    settings.state_dir.mkdir(mode=0o700)
    settings.state_dir.chmod(0o707)
    found = _only(check_directories(settings), Level.PROBLEM, "other users may write")
    assert f"chmod o-w {settings.state_dir}" in found.remedy
    settings.state_dir.chmod(0o705)
    assert _is_fine(check_directories(settings))
    settings.runtime_dir.touch()
    _only(check_directories(settings), Level.PROBLEM, "is not a directory", "--runtime-dir")
    settings.runtime_dir.unlink()
    long = settings.model_copy(update={"runtime_dir": tmp_path / ("x" * 100)})
    _only(check_directories(long), Level.PROBLEM, "shorter directory")


def test_directories_of_another_user(tmp_path):
    """The line names the user to run as, and the directory's owner."""
    settings = _settings(tmp_path)
    settings.state_dir.mkdir(mode=0o700)
    if not os.geteuid():
        os.chown(settings.state_dir, 0, 0)
        settings.state_dir.chmod(0o555)
    else:
        settings.state_dir.chmod(0o500)
    with _as_nobody(tmp_path):
        found = list(check_directories(settings))
    settings.state_dir.chmod(0o700)
    state = [f for f in found if f.check == "state_dir"]
    level = Level.PROBLEM if os.geteuid() else Level.WARNING  # one's own, or another's
    _only(state, level, "belongs to", "kvd doctor", "--state-dir")


@contextmanager
def _as_nobody(directory: Path) -> Iterator[None]:
    """Run without root's rights, if there are any; let this user look below `directory`."""
    if os.geteuid():
        yield
        return
    for parent in (directory, *directory.parents):
        if parent.stat().st_uid == 0 and parent.stat().st_mode & 0o011 != 0o011:
            parent.chmod(parent.stat().st_mode | 0o011)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_file_systems_that_are_unsuitable(tmp_path, machine):
    """An index over NFS breaks; an SSD tier in memory is none."""
    settings = _settings(tmp_path)
    settings.state_dir.mkdir()
    mounts = machine.proc / "self/mounts"
    plain = mounts.read_text()
    _write(mounts, f"{plain}host:/x {settings.state_dir} nfs4 rw 0 0\n")
    _only(check_state_disk(settings, machine), Level.PROBLEM, "nfs4", "local SSD")
    _write(mounts, f"{plain}none {settings.state_dir} tmpfs rw 0 0\n")
    _only(check_state_disk(settings, machine), Level.WARNING, "tmpfs", "ssd.bytes = 0")
    advised = settings.model_copy(update={"ssd": SsdSettings(bytes=0)})
    assert _is_fine(check_state_disk(advised, machine))
    _write(mounts, plain)
    assert file_system_of(settings.state_dir, machine.proc) == "ext4"


def test_a_disk_without_room(tmp_path, machine):
    """A reserve that leaves nothing, or a tier that does not fit: lower it."""
    settings = _settings(tmp_path)
    settings.state_dir.mkdir()

    def check(**ssd: object) -> list[Finding]:
        changed = settings.model_copy(update={"ssd": SsdSettings(**ssd, direct="off")})
        return list(check_state_disk(changed, machine))

    _only(check(bytes=MIB, reserve_bytes=PIB), Level.PROBLEM, "lower ssd.reserve_bytes")
    _only(check(bytes=PIB, reserve_bytes=0), Level.WARNING, "lower ssd.bytes")
    assert _is_fine(check(bytes=MIB, reserve_bytes=0))


def test_a_file_system_without_direct_io(tmp_path, machine):
    """With ssd.direct = "on" kvd does not start there; with "auto" it does."""
    settings = _settings(tmp_path)
    settings.state_dir.mkdir()

    def check(direct: str) -> list[Finding]:
        ssd = SsdSettings(bytes=MIB, reserve_bytes=0, direct=direct)
        changed = settings.model_copy(update={"ssd": ssd})
        return list(check_state_disk(changed, machine, lambda _: False))

    _only(check("on"), Level.PROBLEM, 'ssd.direct = "auto"')
    _only(check("auto"), Level.WARNING, "ext4 or XFS")
    assert _is_fine(check("off"))


def test_too_few_descriptors(tmp_path):
    """The possible number is computed: segments, engines, and some more."""
    settings = _settings(tmp_path).model_copy(
        update={
            "ssd": SsdSettings(bytes=1024 * GIB, segment_bytes=GIB),
            "limits": LimitSettings(max_engines=8, max_layouts=1),
        }
    )
    settings.state_dir.mkdir()
    limits = ProcessLimits(None, 1024, is_root=False)
    wanted = 1024 + 1 + 8 * 8 + 256
    found = check_descriptors(settings, limits)
    _only(found, Level.PROBLEM, f"ulimit -n {wanted}", "LimitNOFILE=", "ssd.segment_bytes")
    assert _is_fine(check_descriptors(settings, replace(limits, open_files=wanted)))


def test_a_unit_s_limit_of_open_files_comes_before_the_shell_s():
    """kvd is started by the unit; `infinity` means no bound."""
    own = ProcessLimits(None, 1024, is_root=True)
    assert limits_of_service({}, own) == own
    assert limits_of_service({"LimitNOFILESoft": "65536"}, own) == replace(own, open_files=65536)
    assert limits_of_service({"LimitNOFILESoft": "infinity"}, own) == replace(own, open_files=None)


def test_a_unit_that_does_not_fit_the_settings(tmp_path):
    """Room in the descriptor store, bounds on memory, and whether the unit is current."""
    settings = _settings(tmp_path, keep="auto")
    unit = {
        "LoadState": "loaded",
        "ActiveState": "active",
        "Result": "success",
        "NeedDaemonReload": "no",
        "FileDescriptorStoreMax": "64",
        "MemoryHigh": "infinity",
        "MemoryMax": "infinity",
    }
    assert _is_fine(check_unit(unit, settings))
    assert _is_fine(check_unit({}, settings))
    for changed, level, words in (
        ({"FileDescriptorStoreMax": "4"}, Level.PROBLEM, ("FileDescriptorStoreMax=16", "DRAM")),
        ({"MemoryHigh": str(GIB)}, Level.PROBLEM, ("MemoryHigh=3072M", "slowed")),
        ({"MemoryMax": str(GIB)}, Level.PROBLEM, ("MemoryMax=3072M", "killed")),
        ({"NeedDaemonReload": "yes"}, Level.WARNING, ("systemctl daemon-reload",)),
        (
            {"ActiveState": "failed", "Result": "exit-code"},
            Level.PROBLEM,
            ("exit-code", "journalctl -u kvd.service"),
        ),
    ):
        _only(check_unit(unit | changed, settings), level, *words)


def test_the_real_machine_has_the_needed_files():
    """The real /proc has the fields that the checks read."""
    real = Machine()
    assert real.memory("MemTotal") > real.memory("MemAvailable") > mmap.PAGESIZE
    assert real.memory("NoSuchField") == 0
    assert file_system_of(Path("/proc/self")) == "proc"
    assert AccessSettings().groups == ("", "", "")


def test_swap(machine: Machine) -> None:
    """Swap is a warning, unless the unit or the control group keeps kvd out of it."""
    assert [found.level for found in check_swap(machine, {})] == [Level.OK]
    with (machine.proc / "meminfo").open("a") as file:
        file.write("SwapTotal: 1048576 kB\n")
    _only(check_swap(machine, {}), Level.WARNING, "1.0 GB of swap", "MemorySwapMax=0")
    _only(check_swap(machine, {"MemorySwapMax": "infinity"}), Level.WARNING, "swap")
    assert [found.level for found in check_swap(machine, {"MemorySwapMax": "0"})] == [Level.OK]
    _write(machine.sys / "fs/cgroup/kvd.slice/memory.swap.max", "0")
    assert [found.level for found in check_swap(machine, {})] == [Level.OK]


def test_a_file_in_a_closed_directory_is_not_reported_as_missing(tmp_path):
    """Settings in /etc/kvd, which other users cannot enter, are hidden, not absent."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "kvd.toml").write_text("")
    closed.chmod(0)
    with _as_nobody(tmp_path):
        assert not may_read(closed / "kvd.toml")
        assert not may_read(closed / "kvd" / "kvd.toml")
        assert may_read(tmp_path / "missing.toml")
        assert may_read(tmp_path / "missing" / "kvd.toml")
    closed.chmod(0o700)
    assert may_read(closed / "kvd.toml")
