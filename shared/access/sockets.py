"""Unix sockets of a group: whoever is in it may connect, nobody else."""

import grp
import os
from pathlib import Path

from shared.types.errors import ConfigError

SOCKET_MODE = 0o660  # owner and group


class SocketGroupError(ConfigError):
    """A socket cannot be given to its group."""

    reason = "socket_group"


def open_to_group(path: Path, group: str = "", mode: int = SOCKET_MODE) -> None:
    """Let a group connect to a socket that has just been bound, under a umask that let nobody.

    Args:
        path: of the socket.
        group: its name or number; "": the group it has.
        mode: of the socket.

    Raises:
        SocketGroupError: there is no such group, or this user may not give files to it.
        OSError: the mode cannot be set.
    """
    if group:
        try:
            os.chown(path, -1, _gid_of(group))
        except PermissionError as error:
            raise SocketGroupError(
                f"{path} cannot be given to group {group}",
                "make this user a member of it (systemd: SupplementaryGroups=)",
            ) from error
    path.chmod(mode)


def _gid_of(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise SocketGroupError(
            f"there is no group {group}", f"make it: groupadd --system {group}"
        ) from error
