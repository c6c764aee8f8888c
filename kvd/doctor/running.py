"""Checks of the running kvd: its sockets, its release, its tiers, and the settings in force."""

import grp
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvd.config import Settings, is_live
from kvd.doctor.finding import Finding, ok, problem, warning
from shared.access.denials import user_name
from shared.config.settings import LoadedSettings
from shared.pb.kvd.v1 import kvd_pb2
from shared.process.runtime_dir import DATA_SOCKET, ENGINE_SOCKET, OPERATOR_SOCKET, READER_SOCKET
from shared.types.units import format_bytes, format_duration
from shared.version import __version__

_OPEN = os.R_OK | os.W_OK
_OTHERS = 0o007
_MAX_KEYS = 8  # settings listed in one line


def check_sockets(settings: Settings) -> Iterator[Finding]:
    """Check the sockets' mode and group, and which of them this user may open."""
    access = settings.access
    roles = {
        "operator": (OPERATOR_SOCKET, access.operator_group),
        "reader": (READER_SOCKET, access.reader_group),
        "engine": (ENGINE_SOCKET, access.engine_group),
    }
    mine = []
    for role, (name, group) in roles.items():
        path = settings.runtime_dir / name
        if not _is_there(path):
            continue
        yield from _check_access(path, group)
        if os.access(path, _OPEN, effective_ids=True):
            mine.append(role)
        elif role == "operator":
            yield warning(
                "sockets",
                f"this user ({_user()}) may not open {path}, which flush, pin, ttl, verify and "
                "export need",
                _access_remedy(path),
            )
    if not _may_enter(settings.runtime_dir):
        yield problem(
            "sockets",
            f"this user ({_user()}) may not enter {settings.runtime_dir}, where kvd's sockets are",
            _access_remedy(settings.runtime_dir),
        )
    elif mine:
        yield ok("sockets", f"this user ({_user()}) may call kvd as {', '.join(mine)}")
    yield from _engine_user(settings)


def check_answer(answer: kvd_pb2.GetStatsResponse) -> Iterator[Finding]:
    """Check that kvd, the engines and this installation are of one release."""
    if answer.version != __version__:
        yield warning(
            "versions",
            f"kvd runs release {answer.version}, but release {__version__} is installed",
            "restart it: systemctl restart kvd (DRAM is kept)",
        )
    for engine in answer.engines:
        if engine.version and engine.version != answer.version:
            yield warning(
                "versions",
                f"engine {engine.name} (pid {engine.pid}) runs release {engine.version}, but kvd "
                f"runs {answer.version}",
                "restart the older one; sessions are kept",
            )
    if answer.process.dumps:
        yield warning(
            "dumps",
            "process.dumps lets kvd write core dumps and lets its user debug it: both reveal "
            "conversations",
            "when you are done, set process.dumps = false and restart kvd (DRAM is kept)",
        )
    names = ", ".join(engine.name for engine in answer.engines) or "none"
    yield ok("kvd", f"kvd {answer.version} answers (pid {answer.process.pid}); engines: {names}")


def check_tiers(
    answer: kvd_pb2.GetStatsResponse, running: Mapping[str, kvd_pb2.Setting]
) -> Iterator[Finding]:
    """Check that each layout's cache is available and not degraded."""
    for missing in answer.unavailable:
        yield problem(
            "tiers",
            f"layout {missing.layout[:12]} has been unavailable for "
            f"{format_duration(missing.since_s)}: {missing.why}; meanwhile its engines "
            "recompute",
            missing.remedy,
        )
    for layout in answer.layouts:
        name = layout.layout[:12]
        for tier in layout.tiers:
            if tier.degraded:
                yield _degraded(name, tier.degraded_reason)
        yield from _arena(name, layout.arena, running)
        yield from _damage(name, layout)
        if layout.quarantined_slots:
            held = layout.quarantined_slots * layout.block_bytes
            yield warning(
                "leases",
                f"layout {name}: {format_bytes(held)} of DRAM are reserved for a process that "
                "lost its connection to kvd",
                "kvd leases shows the process; if it hangs, run: kvd leases --kill PID",
            )


def check_settings_in_force(
    loaded: LoadedSettings[Settings], running: Mapping[str, kvd_pb2.Setting]
) -> Iterator[Finding]:
    """Check that the file's settings are in force, except where flags or the environment differ."""
    comparable = ("file", "default")
    changed = [
        key
        for key, value, source in loaded.rows()
        if key in running
        and running[key].source in comparable
        and source in comparable
        and running[key].value != value
    ]
    here = {key for key, _, _ in loaded.rows()}
    changed += [k for k, row in running.items() if k not in here and row.source == "file"]
    reload = [key for key in changed if is_live(key)]
    restart = [key for key in changed if not is_live(key)]
    if reload:
        yield warning(
            "settings",
            f"changed in the file, but not in force yet: {_shortened(reload)}",
            "run: kvd config reload",
        )
    if restart:
        yield warning(
            "settings",
            f"changed in the file, but in force only after a restart: {_shortened(restart)}",
            "run: systemctl restart kvd (DRAM is kept)",
        )


def _access_remedy(path: Path) -> str:
    """Return the remedy that lets this user open a socket, or enter a directory, of kvd's."""
    status, group = path.stat(), _group_of(path)
    if not status.st_gid or not status.st_mode & stat.S_IRWXG:  # no group has access
        return "use sudo; or set access.operator_group to a group of yours, and restart kvd"
    return f"run sudo usermod -aG {group} {_user()} and log in again, or use sudo"


def _check_access(path: Path, group: str) -> Iterator[Finding]:
    """Check a socket's mode and group against the settings."""
    status = path.stat()
    if stat.S_IMODE(status.st_mode) & _OTHERS:
        yield problem(
            "sockets",
            f"every user may open {path} (mode {stat.S_IMODE(status.st_mode):o})",
            f"run: chmod 660 {path}",
        )
    if group and group not in (_group_of(path), str(status.st_gid)):
        yield problem(
            "sockets",
            f"{path} belongs to group {_group_of(path)}, but the settings say {group}",
            "restart kvd: systemctl restart kvd",
        )


def _engine_user(settings: Settings) -> Iterator[Finding]:
    path = settings.runtime_dir / DATA_SOCKET
    if not _is_there(path):
        return
    uid = os.geteuid()
    if uid in (0, path.stat().st_uid, *settings.engine_uids()):
        yield ok("engine_user", f"engines of {_user()} may attach")
    else:
        yield warning(
            "engine_user",
            f"engines of {_user()} may not attach",
            f'run engines as another user, or add "{_user()}" to access.allowed_uids and run: '
            "kvd config reload",
        )


def _degraded(layout: str, reason: str) -> Finding:
    remedy = (
        "free some space on its disk (see: df -h)"
        if reason == "full"
        else "check its disk with dmesg and smartctl -a; KV in DRAM is still served"
    )
    return problem("tiers", f"layout {layout}: KV is not written to SSD ({reason})", remedy)


def _arena(
    layout: str, arena: kvd_pb2.ArenaStats, running: Mapping[str, kvd_pb2.Setting]
) -> Iterator[Finding]:
    if not arena.arena_id:
        return
    keep = running.get("dram.keep")
    if arena.keep == "none" and keep is not None and keep.value != "none":
        yield warning(
            "tiers",
            f"layout {layout}: after a restart of kvd its DRAM tier is empty",
            "run kvd under systemd (kvd install-units), or without access.allowed_uids",
        )


def _damage(layout: str, stats: kvd_pb2.LayoutStats) -> Iterator[Finding]:
    num_corrupt = stats.counters.get("blocks_corrupt", 0)
    num_errors = stats.counters.get("read_errors", 0) + stats.counters.get("write_errors", 0)
    if num_corrupt:
        yield warning(
            "tiers",
            f"layout {layout}: {num_corrupt} copies of blocks were damaged since the start "
            "(none was served)",
            "run kvd verify --repair, and check the disk and the memory with dmesg",
        )
    if num_errors:
        yield warning(
            "tiers",
            f"layout {layout}: {num_errors} reads or writes have failed since the start",
            "check the disk with dmesg and smartctl -a",
        )


def _is_there(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # in a directory that this user may not enter
        return False


def _may_enter(directory: Path) -> bool:
    return not os.access(directory, os.F_OK) or os.access(directory, os.X_OK, effective_ids=True)


def _user() -> str:
    return user_name(os.geteuid())


def _group_of(path: Path) -> str:
    gid = path.stat().st_gid
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _shortened(keys: list[str]) -> str:
    more = len(keys) - _MAX_KEYS
    return ", ".join(keys[:_MAX_KEYS]) + (f" and {more} more" if more > 0 else "")
