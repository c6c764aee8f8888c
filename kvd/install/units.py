"""The files to install: their places and texts. Pure, except that it reads the shipped files.

The shipped files are those of systemd/: in the package of an installed kvd, beside it in a working
tree. They are complete: units name /opt/cachedattention, and the settings are the reference. From
them, without templates, are made:

1. units and settings with this machine's paths,
2. the system's settings with the groups and users of the shipped sysusers file, instead of the
   defaults for a kvd that is alone on the machine,
3. a user's units, without the part that only the system's manager supports.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import kvd
from kvd.errors import InstallError
from shared.config.completion import Shell, completion_script

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


UNITS = (
    "kvd.service",
    "kvd-remote.service",
    "inference-svc@.service",
    "cachedattention.slice",
)
SETTINGS = ("kvd.toml", "inference-svc.toml")
# Only for the system: shipped name → (directory of /usr/local/lib, name there).
SYSTEM_FILES: Mapping[str, tuple[str, str]] = {
    "cachedattention-sysusers.conf": ("sysusers.d", "cachedattention.conf"),
    "cachedattention-tmpfiles.conf": ("tmpfiles.d", "cachedattention.conf"),
    "80-cachedattention.preset": ("systemd/system-preset", "80-cachedattention.preset"),
}
SHIPPED = (*UNITS, *SETTINGS, *SYSTEM_FILES)

# The directory of installed units: an administrator's own files, in /etc, take precedence over it.
LOCAL = Path("usr/local/lib")
PROGRAMS = ("kvd", "inference-svc")
# Places, below a share directory, in which shells look for a program's completions.
COMPLETIONS: Mapping[Shell, str] = {
    Shell.BASH: "bash-completion/completions/{program}",
    Shell.ZSH: "zsh/site-functions/_{program}",
    Shell.FISH: "fish/vendor_completions.d/{program}.fish",
}
SHIPPED_PROGRAMS = "/opt/cachedattention/bin"
SYSTEM_ONLY = "# ---- From here to [Install]"
_INSTALL = "[Install]"

# The users and groups of cachedattention-sysusers.conf.
SYSTEM_VALUES: Mapping[str, Mapping[str, str]] = {
    "kvd.toml": {
        "access.engine_group": '"kvd-engine"',
        "access.operator_group": '"kvd-operator"',
        "access.reader_group": '"kvd-reader"',
        "access.allowed_uids": '["inference"]',
    },
    "inference-svc.toml": {"server.socket_group": '"inference-client"'},
}


@dataclass(frozen=True)
class PlannedFile:
    """A file to install.

    Attributes:
        path: its place.
        text: its whole text.
        top: a directory above it that belongs to the system. Directories below `top` are removed
            with the last file in them.
        is_settings: once installed it belongs to the operator, and is never overwritten.
    """

    path: Path
    text: str
    top: Path
    is_settings: bool = False


@dataclass(frozen=True)
class PlannedLink:
    """A symbolic link to install.

    Attributes:
        path: its place.
        target: a file of this installation.
        top: as PlannedFile.top.
    """

    path: Path
    target: Path
    top: Path


Planned = PlannedFile | PlannedLink


@dataclass(frozen=True)
class UserDirectories:
    """A user's directories, by the XDG base directory specification.

    Attributes:
        programs: the directory in the user's PATH.
    """

    programs: Path
    config: Path
    data: Path
    state: Path
    runtime: Path


def system_files(shipped: Mapping[str, str], programs: Path, root: Path) -> list[PlannedFile]:
    """Return the files to install for the whole machine.

    Args:
        shipped: the texts of all SHIPPED files, by name.
        programs: the directory of `kvd` and `inference-svc`, as the machine sees it.
        root: the directory that is / for the machine.
    """
    local, etc = root / LOCAL, root / "etc"
    paths = {SHIPPED_PROGRAMS: str(programs)}
    files = [
        PlannedFile(local / "systemd/system" / name, replace_paths(shipped[name], paths), local)
        for name in UNITS
    ]
    for name, (directory, installed) in SYSTEM_FILES.items():
        files.append(PlannedFile(local / directory / installed, shipped[name], local))
    for name in SETTINGS:
        text = with_values(shipped[name], SYSTEM_VALUES[name])
        files.append(PlannedFile(etc / "kvd" / name, text, etc, is_settings=True))
    return files


def user_files(
    shipped: Mapping[str, str], programs: Path, own: UserDirectories
) -> list[PlannedFile]:
    """Return the files to install for one user's systemd."""
    paths = {
        SHIPPED_PROGRAMS: str(programs),
        "/etc/kvd/": f"{own.config}/kvd/",
        "/run/": f"{own.runtime}/",
        "/var/lib/models/": f"{own.data}/models/",
        "/var/lib/": f"{own.state}/",
        "multi-user.target": "default.target",
    }
    units = [
        PlannedFile(
            own.data
            / "systemd/user"
            / name,  # not in config, which is for the user's own edits and masks
            replace_paths(without_system_only(shipped[name]), paths),
            own.data,
        )
        for name in UNITS
    ]
    settings = [
        PlannedFile(
            own.config / "kvd" / name,
            "".join(
                line if line.startswith("#") else replace_paths(line, paths)
                for line in shipped[name].splitlines(keepends=True)
            ),
            own.config,
            is_settings=True,
        )
        for name in SETTINGS
    ]
    return [*units, *settings]


def command_files(
    programs: Path,
    pages: Iterable[Path],
    bin_dir: Path,
    share: Path,
) -> list[Planned]:
    """Return links and scripts by which shells, `man` and completion find the commands.

    Args:
        programs: as in system_files.
        pages: man pages of the installation.
        bin_dir: a directory in PATH.
        share: the share directory that belongs to it.
    """
    links = [PlannedLink(bin_dir / name, programs / name, bin_dir) for name in PROGRAMS]
    man = share / "man"
    links += [PlannedLink(man / "man1" / page.name, page, man) for page in pages]
    scripts = [
        PlannedFile(share / place.format(program=name), completion_script(name, shell), share)
        for name in PROGRAMS
        for shell, place in COMPLETIONS.items()
    ]
    return [*links, *scripts]


def replace_paths(text: str, paths: Mapping[str, str]) -> str:
    """Replace paths in one pass: a replacement is not replaced again."""
    pattern = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    return re.sub(pattern, lambda match: paths[match[0]], text)


def without_system_only(unit: str) -> str:
    """Remove the part between the marker and [Install]."""
    head, marker, tail = unit.partition(SYSTEM_ONLY)
    if not marker:
        return unit
    return head + _INSTALL + tail.partition("\n" + _INSTALL)[2]


def with_values(settings: str, values: Mapping[str, str]) -> str:
    """Set keys in a commented TOML text; everything else stays as it is.

    Args:
        settings: a text with each key on its own line, in its section.
        values: TOML values by dotted key.

    Raises:
        InstallError: a key is missing in the text.
    """
    left = dict(values)
    lines = []
    for key, line in _keyed_lines(settings):
        if key in left:
            lines.append(f"{line.partition('=')[0]}= {left.pop(key)}")
        else:
            lines.append(line)
    if left:
        raise InstallError(
            f"the shipped settings do not contain {', '.join(left)}",
            "install a complete release of kvd",
        )
    return "\n".join(lines) + "\n"


def _keyed_lines(settings: str) -> Iterator[tuple[str, str]]:
    """Yield each line with the dotted key that it sets; "": it sets none."""
    section = ""
    for line in settings.splitlines():
        if header := re.match(r"\[([^\]]+)\]", line):
            section = header[1] + "."
        key = re.match(r"(\w+) *=", line)
        yield (section + key[1] if key else ""), line


PACKAGED = "units"  # the directory in the wheel, as pyproject.toml has it


def read_shipped() -> dict[str, str]:
    """Return the texts of all SHIPPED files, by name.

    Raises:
        InstallError: this installation has none.
    """
    tree = Path(kvd.__file__).resolve().parents[1] / "systemd"
    places: tuple[Traversable, ...] = (resources.files(kvd) / PACKAGED, tree)
    for place in places:
        if (place / SHIPPED[0]).is_file():
            return {name: (place / name).read_text(encoding="utf-8") for name in SHIPPED}
    raise InstallError("this installation contains no units", "install kvd from its wheel")


def man_pages() -> list[Path]:
    """Return the man pages of this installation, or of the working tree."""
    tree = Path(kvd.__file__).resolve().parents[1] / "docs" / "man"
    for place in (tree, Path(sys.prefix) / "share" / "man" / "man1"):
        found = (page for name in PROGRAMS for page in place.glob(f"{name}*.1"))
        if pages := sorted(found):
            return pages
    return []
