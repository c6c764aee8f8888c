"""The runtime and the state directory: created, checked and locked when kvd starts."""

import fcntl
import os
from pathlib import Path

from kvd.errors import RunningError, UnusableDirectoryError
from shared.process.log import get_logger
from shared.process.runtime_dir import MAX_SOCKET_PATH, OPERATOR_SOCKET

LOCK_NAME = "kvd.lock"
# Search permission for group and others: a member of the group does not get that of the others.
ENTER = 0o011

log = get_logger(__name__)


def claim_directory(path: Path, purpose: str, flag: str) -> int:
    """Lock a directory for this process; create it (mode 0700) if it is missing.

    Args:
        path: the directory.
        purpose: "runtime" or "state", for messages.
        flag: command-line option of the directory, for messages.

    Returns:
        Descriptor that holds the lock; the kernel releases it when the process ends.

    Raises:
        UnusableDirectoryError: the directory cannot be created or written, or other users can
            write to it.
        RunningError: another kvd has locked it.
    """
    remedy = f"give a directory of your own with {flag}"
    try:
        if not path.is_dir():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.info("directory_made", directory=str(path), reason=f"{purpose} directory")
        _check_private(path, purpose, remedy)
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnusableDirectoryError(
            f"cannot use the {purpose} directory {path} ({error.strerror})", remedy
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise RunningError(
            f"another kvd uses the {purpose} directory {path}", f"stop that kvd, or {remedy}"
        ) from error
    return lock_fd


def _check_private(path: Path, purpose: str, remedy: str) -> None:
    status = path.stat()
    if os.geteuid() != 0 and status.st_uid not in (0, os.geteuid()):
        raise UnusableDirectoryError(
            f"the {purpose} directory {path} belongs to another user (uid {status.st_uid})",
            f"give it to this user with chown, or {remedy}",
        )
    if status.st_mode & 0o002:
        raise UnusableDirectoryError(
            f"other users may write to the {purpose} directory {path}",
            f"run chmod 700 {path} if only kvd uses it, or {remedy}",
        )


def let_others_enter(path: Path) -> None:
    """Let all users enter a directory; the sockets in it have permissions of their own.

    Raises:
        UnusableDirectoryError: the permission is missing, and kvd may not add it.
    """
    mode = path.stat().st_mode
    if mode & ENTER == ENTER:
        return
    try:
        path.chmod(mode & 0o7777 | ENTER)
    except OSError as error:
        raise UnusableDirectoryError(
            f"the groups of [access] may not enter {path}, and kvd cannot permit it",
            f"run: chmod go+x {path} (under systemd: RuntimeDirectoryMode=0711)",
        ) from error


def check_socket_paths(runtime_dir: Path) -> None:
    """Check that the paths of kvd's sockets are not too long for the kernel.

    Raises:
        UnusableDirectoryError: a path is too long.
    """
    length = len(os.fsencode(runtime_dir / OPERATOR_SOCKET))  # the longest name
    if length > MAX_SOCKET_PATH:
        raise UnusableDirectoryError(
            f"paths of sockets in {runtime_dir} have {length} bytes, but at most "
            f"{MAX_SOCKET_PATH} are possible",
            "give a shorter directory with --runtime-dir",
        )
