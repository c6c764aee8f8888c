"""Unix sockets to listen at: claiming their paths, and opening them to a group.

Only members of the group may connect. The directory of a socket is made if its parent exists, and
that is logged. No more is made: a misspelled path must not become a tree of directories in which no
client looks for a socket.
"""

import errno
import grp
import os
import socket
from pathlib import Path

from shared.process.log import get_logger
from shared.types.errors import ConfigError

log = get_logger(__name__)


class SocketInUseError(ConfigError):
    """Another process answers at the path, or a file that is no socket is there."""

    reason = "socket_in_use"


def claim_path(path: Path) -> None:
    """Prepare the path of a socket: make its directory, remove a stale file.

    Raises:
        SocketInUseError: another process answers there, or the directory cannot be used.
    """
    directory = path.parent
    try:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, exist_ok=True)
            log.info("directory_made", directory=str(directory), reason=f"for the socket {path}")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "this user may not write to its directory")
        if not path.exists():
            return
        if not path.is_socket():
            raise FileExistsError(errno.EEXIST, "a file that is not a socket is in its place")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)  # connecting blocks while the other process's backlog is full
            probe.connect(str(path))
    except FileNotFoundError as error:
        raise SocketInUseError(
            f"the socket {path} cannot be used: there is no directory {directory.parent}",
            f"run: mkdir -p -m 700 {directory}; or name a path in an existing directory",
        ) from error
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)  # left behind by a process that was killed
    except OSError as error:
        raise SocketInUseError(
            f"the socket {path} cannot be used ({error.strerror or error})",
            "name a path in a directory that this user may write to",
        ) from error
    else:
        raise SocketInUseError(
            f"the socket {path} is in use by another process",
            "stop that process, or name another path",
        )


SOCKET_MODE = 0o660  # owner and group


class SocketGroupError(ConfigError):
    """A socket cannot be given to its group."""

    reason = "socket_group"


def open_to_group(path: Path, group: str = "", mode: int = SOCKET_MODE) -> None:
    """Let a group connect to a socket that was just bound under a umask that admits no one.

    Args:
        path: the socket's path.
        group: the group's name or number; "": the group that the socket has.
        mode: the socket's mode.

    Raises:
        SocketGroupError: there is no such group, or this user may not give files to it.
        OSError: the mode cannot be set.
    """
    if group:
        try:
            os.chown(path, -1, _gid_of(group))
        except PermissionError as error:
            raise SocketGroupError(
                f"the socket {path} cannot be given to group {group}",
                "add this user to that group (under systemd: SupplementaryGroups=)",
            ) from error
    path.chmod(mode)


def _gid_of(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise SocketGroupError(
            f"the group {group} does not exist", f"create it with: groupadd --system {group}"
        ) from error
