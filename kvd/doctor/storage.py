"""Checks of storage: the state and runtime directories, their disk, and file descriptors."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.caches.budgets import ssd_bytes
from kvd.caches.layout_opening import VOLUMES
from kvd.config import Settings
from kvd.doctor.finding import Finding, ok, problem, warning
from kvd.doctor.machine import Machine, ProcessLimits, is_directory, may_write
from kvd.doctor.memory import MEMORY_FILE_SYSTEMS, file_system_of
from kvd.host.directories import check_socket_paths
from kvd.tiers.direct_io import probe_direct
from shared.access.denials import user_name
from shared.types.errors import ReportedError
from shared.types.units import ceil_div, format_bytes

REMOTE_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "glusterfs")
FDS_OF_ENGINE = 8  # descriptors per engine: connections, the arena, pidfd
OTHER_FDS = 256  # descriptors of the index, sockets and RPCs


def check_directories(settings: Settings) -> Iterator[Finding]:
    """Check that kvd may use its directories, without creating or locking them."""
    for check, path, flag in (
        ("runtime_dir", settings.runtime_dir, "--runtime-dir"),
        ("state_dir", settings.state_dir, "--state-dir"),
    ):
        yield _directory(check, path, flag)
    try:
        check_socket_paths(settings.runtime_dir)
    except ReportedError as error:
        yield problem("runtime_dir", error.message, error.remedy)


def check_state_disk(
    settings: Settings, machine: Machine, probe: Callable[[Path], bool] = probe_direct
) -> Iterator[Finding]:
    """Check that the disk under the state directory suits an index and volumes, and has room."""
    path = _nearest_existing(settings.state_dir)
    kind = file_system_of(path, machine.proc)
    if kind in REMOTE_FILE_SYSTEMS:
        yield problem(
            "state_disk",
            f"state_dir {path} is on {kind}, but the index needs a local file system",
            "give a directory on a local SSD with --state-dir",
        )
    elif kind in MEMORY_FILE_SYSTEMS and settings.ssd.bytes != 0:
        yield warning(
            "state_disk",
            f"state_dir {path} is on {kind}: its SSD tier uses memory, and is lost when the "
            "machine stops",
            "give a directory on a local SSD with --state-dir, or set ssd.bytes = 0",
        )
    else:
        yield ok("state_disk", f"state_dir {path} is on {kind}")
    if not may_write(path):
        return  # check_directories reports this
    yield from _space(settings, path)
    yield from _direct_io(settings, path, probe)


def check_descriptors(settings: Settings, limits: ProcessLimits) -> Iterator[Finding]:
    """Check that the limit of open files allows as many as the settings can need."""
    limit = limits.open_files
    path = _nearest_existing(settings.state_dir)
    tier = (
        ssd_bytes(settings.ssd.bytes, path / VOLUMES)
        if path == settings.state_dir and may_write(path)
        else (settings.ssd.bytes or 0)
    )
    num_segments = ceil_div(tier, settings.ssd.segment_bytes) + settings.limits.max_layouts
    wanted = num_segments + FDS_OF_ENGINE * settings.limits.max_engines + OTHER_FDS
    if limit is not None and limit < wanted:
        yield problem(
            "descriptors",
            f"kvd may open {limit} files, but it may need {wanted}: for {num_segments} "
            f"segments and {settings.limits.max_engines} engines",
            f"run: ulimit -n {wanted} (under systemd: LimitNOFILE=); or raise ssd.segment_bytes",
        )
    else:
        yield ok(
            "descriptors",
            f"{limit or 'any number of'} files may be open, and kvd may need {wanted}",
        )


def _directory(check: str, path: Path, flag: str) -> Finding:
    existing = _nearest_existing(path)
    name = check.replace("_", " ").replace("dir", "directory")
    own = f"give a directory of your own with {flag}"
    if not is_directory(existing):
        return problem(check, f"{existing} is not a directory", own)
    if not may_write(existing):
        if existing == path and existing.stat().st_uid != os.geteuid():
            return _foreign_directory(check, path)
        owner = user_name(existing.stat().st_uid)
        return problem(
            check,
            f"{existing} belongs to {owner}, and {user_name(os.geteuid())} may not write to it",
            f"run this as kvd's user (sudo -u {owner} kvd doctor), give the directory to this "
            f"user with chown, or {own}",
        )
    status = existing.stat()
    is_trusted = os.geteuid() == 0 or status.st_uid in (0, os.geteuid())
    if existing == path and (not is_trusted or status.st_mode & 0o002):
        return problem(
            check, f"other users may write to {path}", f"run: chmod o-w {path}; or {own}"
        )
    return ok(check, f"{name} {path}" + ("" if existing == path else " can be created"))


def _foreign_directory(check: str, path: Path) -> Finding:
    """Return the finding on a directory of kvd's that another user looks at."""
    owner = user_name(path.stat().st_uid)
    if check == "runtime_dir":
        return ok(check, f"{path} belongs to {owner}")
    return warning(
        check,
        f"{path} belongs to {owner}, so {user_name(os.geteuid())} cannot examine it",
        f"run this as kvd's user: sudo -u {owner} kvd doctor; or give a directory of your "
        "own with --state-dir",
    )


def _space(settings: Settings, path: Path) -> Iterator[Finding]:
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    volumes = settings.state_dir / VOLUMES
    used = sum(file.stat().st_blocks * 512 for file in volumes.glob("*/*.segment"))
    wanted = settings.ssd.bytes
    usable = max(0, free + used - settings.ssd.reserve_bytes)
    if wanted == 0:
        yield ok("disk_space", "ssd.bytes = 0: there is no SSD tier")
    elif not usable:
        yield problem(
            "disk_space",
            f"{format_bytes(free)} are free at {path}, and ssd.reserve_bytes keeps "
            f"{format_bytes(settings.ssd.reserve_bytes)} of that free, so no KV is written to "
            "SSD",
            "free some space, lower ssd.reserve_bytes, or give another --state-dir",
        )
    elif wanted is not None and usable < wanted:
        yield warning(
            "disk_space",
            f"ssd.bytes is {format_bytes(wanted)}, but only {format_bytes(usable)} are usable "
            f"at {path}",
            "lower ssd.bytes, free some space, or give another --state-dir",
        )
    else:
        yield ok("disk_space", f"{format_bytes(usable)} are usable at {path}")


def _direct_io(settings: Settings, path: Path, probe: Callable[[Path], bool]) -> Iterator[Finding]:
    if settings.ssd.direct == "off" or settings.ssd.bytes == 0:
        yield ok("direct_io", f'ssd.direct = "{settings.ssd.direct}"')
        return
    if probe(path):
        yield ok("direct_io", f"{path} supports direct I/O")
    elif settings.ssd.direct == "on":
        yield problem(
            "direct_io",
            f'{path} does not support direct I/O, and ssd.direct = "on", so kvd does not start',
            'set ssd.direct = "auto", or give a --state-dir on ext4 or XFS',
        )
    else:
        yield warning(
            "direct_io",
            f"{path} does not support direct I/O, so reads and writes also fill the page cache",
            "give a --state-dir on ext4 or XFS",
        )


def _nearest_existing(path: Path) -> Path:
    """Return the path, or its closest parent that this user can see."""
    return next(
        parent for parent in (path, *path.parents) if os.access(parent, os.F_OK, effective_ids=True)
    )
