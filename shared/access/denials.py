"""Denials: why a user may not open a Unix socket, and what to do about it."""

import grp
import os
import pwd
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_ENTER = os.X_OK
_OPEN = os.R_OK | os.W_OK


class Denial(NamedTuple):
    """Why a socket cannot be opened, and the remedy. Both are parts of a sentence."""

    what: str
    remedy: str


def denial_of(*paths: Path) -> Denial | None:
    """Return why this user may not open a socket; None: it may, or there is no such file.

    Directories are checked from the top, because nothing can be seen below a closed one.

    Args:
        paths: paths of sockets in one directory. Access to one of them is enough.
    """
    for directory in reversed(paths[0].parents):
        if not _may(os.F_OK, directory):
            return None
        if not _may(_ENTER, directory):
            return _denial("enter", [directory], stat.S_IXGRP)
    there = [path for path in paths if _may(os.F_OK, path)]
    if not there or any(_may(_OPEN, path) for path in there):
        return None
    return _denial("open", there, stat.S_IRGRP | stat.S_IWGRP)


def _may(mode: int, path: Path) -> bool:
    return os.access(path, mode, effective_ids=True)


def _denial(do: str, paths: Sequence[Path], group_mode: int) -> Denial:
    """Describe why this user may not open or enter the paths; name a group that may."""
    statuses = [path.stat() for path in paths]
    groups = [
        _group(status.st_gid)
        for status in statuses
        if status.st_mode & group_mode == group_mode and status.st_gid
    ]
    owner = ", ".join(
        dict.fromkeys(
            f"{user_name(status.st_uid)}:{_group(status.st_gid)}, "
            f"mode {stat.S_IMODE(status.st_mode):o}"
            for status in statuses
        )
    )
    me = user_name(os.geteuid())
    what = f"user {me} may not {do} {' or '.join(map(str, paths))} ({owner})"
    if not groups:
        return Denial(what, f"use sudo, or be {user_name(statuses[0].st_uid)}")
    names = " or ".join(dict.fromkeys(groups))
    return Denial(
        what,
        f"become a member of group {names} (sudo usermod -aG {groups[0]} {me}, and log in again), "
        "or use sudo",
    )


def user_name(uid: int) -> str:
    """Return a user's name; the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
