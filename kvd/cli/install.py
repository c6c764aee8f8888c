"""The command `kvd install-units`: installs units, users and settings for systemd."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvd.cli.options import AsJson
from kvd.errors import InstallError, UnclearSelectionError
from kvd.install.placing import NEW, Deed, place, remove
from kvd.install.units import (
    COMPLETIONS,
    Planned,
    UserDirectories,
    command_files,
    man_pages,
    read_shipped,
    system_files,
    user_files,
)

# Directories that are hidden from system services (ProtectHome=).
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
COMMAND_S = 60.0

# The commands that apply the files, with what they do. None of them touches a running service.
_MAKES = {
    "systemd-sysusers": "makes users and groups",
    "systemd-tmpfiles": "makes directories",
    "systemctl": "has systemd read its units again",
}
SYSTEM_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("systemd-sysusers", "cachedattention.conf"),
    ("systemd-tmpfiles", "--create", "cachedattention.conf"),
    ("systemctl", "daemon-reload"),
)
USER_COMMANDS: tuple[tuple[str, ...], ...] = (("systemctl", "--user", "daemon-reload"),)

_DONE: dict[Deed, str] = {
    "beside": f"kept: what is shipped is now in …{NEW} beside it",
    "foreign": "kept: it is not a link of ours",
}
_WOULD: dict[Deed, str] = {
    "written": "would be written",
    "replaced": "would be replaced",
    "linked": "would be linked",
    "removed": "would be removed",
    "kept": "would be kept: it was changed",
    "beside": f"would be kept: what is shipped would go to …{NEW} beside it",
    "foreign": "would be kept: it is not a link of ours",
}
# Directories whose files are counted in the output, not listed.
_MANY: dict[str, str] = {
    "man1": "man pages",
    **{Path(place).parent.name: "scripts" for place in COMPLETIONS.values()},
}
_NEXT = """\
Next:
  systemctl{user} enable --now kvd
  {kvd} doctor
  systemctl{user} enable --now inference-svc@NAME    # serves {models}/NAME"""


def install_units(
    user: Annotated[
        bool, typer.Option("--user", help="For your own systemd, without root.")
    ] = False,
    root: Annotated[
        Path | None, typer.Option(help="Install under this directory, the root of an image.")
    ] = None,
    removing: Annotated[bool, typer.Option("--remove", help="Remove what was installed.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report what would be done.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Install units, users and settings for systemd; your own settings are kept.

    Links to the commands and their man pages go to /usr/local (with --user: ~/.local), where a
    shell and man find them, and scripts for Tab beside them.
    """
    if user and root is not None:
        raise UnclearSelectionError("--user and --root cannot be used together", "give one of them")
    programs = Path(sys.executable).parent
    files = _plan(programs, root, user=user)
    work = remove if removing else place
    deeds = list(work(files, dry_run=dry_run))
    commands = () if root is not None else _commands(user=user, removing=removing)
    for command in () if dry_run else commands:
        _run(command)
    if as_json:
        document = {
            "files": [{"path": str(path), "done": deed} for path, deed in deeds],
            "commands": [" ".join(command) for command in commands],
            "dry_run": dry_run,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    _show(deeds, commands, dry_run=dry_run)
    if not (removing or dry_run or root is not None):
        models = str(_own_directories().data / "models") if user else "/var/lib/models"
        typer.echo(
            _NEXT.format(user=" --user" if user else "", kvd=programs / "kvd", models=models)
        )


def _plan(programs: Path, root: Path | None, *, user: bool) -> list[Planned]:
    shipped, pages = read_shipped(), man_pages()
    if user:
        own = _own_directories()
        by_name = command_files(programs, pages, own.programs, own.data)
        return [*user_files(shipped, programs, own), *by_name]
    inside = programs
    if root is not None:
        root = root.absolute()
        inside = _inside(programs, root)
        pages = [_inside(page, root) for page in pages]
    if any(inside.is_relative_to(home) for home in HOMES):
        raise InstallError(
            "systemd hides home directories from services, so they cannot run a program in "
            f"{inside}",
            "install kvd into a virtual environment in /opt/cachedattention, or use --user",
        )
    top = root or Path("/")
    local = top / "usr/local"
    by_name = command_files(inside, pages, local / "bin", local / "share")
    return [*system_files(shipped, inside, top), *by_name]


def _inside(path: Path, root: Path) -> Path:
    """Return the path of a file as seen where `root` is /."""
    return Path("/") / path.relative_to(root) if path.is_relative_to(root) else path


def _own_directories() -> UserDirectories:
    def base(variable: str, default: str) -> Path:
        return Path(os.environ.get(variable) or Path.home() / default)

    return UserDirectories(
        programs=Path.home() / ".local/bin",
        config=base("XDG_CONFIG_HOME", ".config"),
        data=base("XDG_DATA_HOME", ".local/share"),
        state=base("XDG_STATE_HOME", ".local/state"),
        runtime=Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"),
    )


def _commands(*, user: bool, removing: bool) -> Sequence[tuple[str, ...]]:
    commands = USER_COMMANDS if user else SYSTEM_COMMANDS
    return commands[-1:] if removing else commands


def _run(command: tuple[str, ...]) -> None:
    remedy = f"run it by hand: {' '.join(command)}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{command[0]} could not be run ({error})", remedy) from error
    if done.returncode:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise InstallError(f"the files are installed, but {command[0]} failed ({words})", remedy)


def _grouped(
    deeds: Iterable[tuple[Path, Deed]],
) -> Mapping[tuple[Path, Deed], Sequence[Path]]:
    """Group deeds of the same kind in directories of many files; all others stay alone."""
    found: dict[tuple[Path, Deed], list[Path]] = {}
    for path, deed in deeds:
        place = path.parent if path.parent.name in _MANY else path
        found.setdefault((place, deed), []).append(path)
    return found


def _show(
    deeds: Iterable[tuple[Path, Deed]], commands: Iterable[tuple[str, ...]], *, dry_run: bool
) -> None:
    words = _WOULD if dry_run else _DONE
    for (group, deed), paths in _grouped(deeds).items():
        plural = _MANY.get(group.name)
        named = group if plural is None else f"{group} ({len(paths)} {plural})"
        typer.echo(f"{named}: {words.get(deed, deed)}")
    for command in commands:
        what = "would be run" if dry_run else "done"
        typer.echo(f"{what}: {' '.join(command)} ({_MAKES[command[0]]})")
