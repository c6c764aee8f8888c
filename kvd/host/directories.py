"""The runtime and the state directory: made, checked and locked before anything else happens."""

import fcntl
import os
from pathlib import Path

from kvd.errors import RunningError, UnusableDirectoryError
from shared.process.log import get_logger
from shared.process.runtime_dir import MAX_SOCKET_PATH, OPERATOR_SOCKET

LOCK_NAME = "kvd.lock"
ENTER = 0o011  # group and others: who is in the group is not looked at as one of the others

log = get_logger(__name__)


def claim_directory(path: Path, purpose: str, flag: str) -> int:
    """Make a directory (mode 0700), which is logged, and lock it for this process.

    Args:
        path: the directory.
        purpose: "runtime" or "state", for messages.
        flag: the option that names another one.

    Returns:
        Descriptor that holds the lock; the kernel releases it with the process.

    Raises:
        UnusableDirectoryError: it cannot be made or written, or others could write to it.
        RunningError: another kvd holds it.
    """
    remedy = f"name a directory of your own with {flag}"
    try:
        if not path.is_dir():
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.info("directory_made", directory=str(path), reason=f"{purpose} directory")
        _check_ours_alone(path, purpose, remedy)
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UnusableDirectoryError(
            f"cannot use {purpose} directory {path} ({error.strerror})", remedy
        ) from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        raise RunningError(
            f"another kvd uses {purpose} directory {path}", f"stop it, or {remedy}"
        ) from error
    return lock_fd


def _check_ours_alone(path: Path, purpose: str, remedy: str) -> None:
    status = path.stat()
    if os.geteuid() != 0 and status.st_uid not in (0, os.geteuid()):
        raise UnusableDirectoryError(
            f"{purpose} directory {path} is another user's (uid {status.st_uid})",
            f"chown it to this one, or {remedy}",
        )
    if status.st_mode & 0o002:
        raise UnusableDirectoryError(
            f"others may write to {purpose} directory {path}",
            f"chmod 700 {path}, if it is for kvd alone, or {remedy}",
        )


def let_others_enter(path: Path) -> None:
    """Let everybody reach the sockets in a directory, each of which says who may open it.

    Raises:
        UnusableDirectoryError: they may not, and it is not ours to change.
    """
    mode = path.stat().st_mode
    if mode & ENTER == ENTER:
        return
    try:
        path.chmod(mode & 0o7777 | ENTER)
    except OSError as error:
        raise UnusableDirectoryError(
            f"the groups of [access] may not enter {path}",
            f"chmod go+x {path} (systemd: RuntimeDirectoryMode=0711)",
        ) from error


def check_socket_paths(runtime_dir: Path) -> None:
    """Refuse a directory in which socket paths would be too long for the kernel.

    Raises:
        UnusableDirectoryError: it is.
    """
    length = len(os.fsencode(runtime_dir / OPERATOR_SOCKET))  # the longest name
    if length > MAX_SOCKET_PATH:
        raise UnusableDirectoryError(
            f"socket paths in {runtime_dir} have {length} bytes, {MAX_SOCKET_PATH} is the limit",
            "name a shorter directory with --runtime-dir",
        )
