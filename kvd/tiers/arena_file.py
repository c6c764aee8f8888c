"""The files behind an arena: memfds, with huge pages or without, or files in a private directory.

Nothing that others may have made is trusted: a directory or file that is not ours alone is refused,
and sizes are read from the descriptor.
"""

import contextlib
import errno
import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kvd.tiers.journal import UnfitArenaError
from shared.kvd_client.arena_map import ArenaMap
from shared.types.units import SECTOR_BYTES, align_up

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
HUGE_PAGE_BYTES = 2 << 20
_MFD_HUGE_2MB = 21 << 26  # log2 of the page size, as in memfd_create(2)
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True)
class SlotsFile:
    """Memory for slots, mapped; `pages` as in Arena."""

    fd: int
    slots: ArenaMap
    pages: str


def sealed_memfd(name: str, num_bytes: int, flags: int = 0) -> int:
    """Make a memfd that nobody can resize. It takes memory only as its pages are used."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def huge_memfd(name: str, slot_bytes: int, num_slots: int) -> SlotsFile:
    """Make a memfd of reserved huge pages.

    Raises:
        OSError: the machine has not enough of them free. The mapping reserves them, so that no
            later touch can fail.
    """
    num_bytes = align_up(slot_bytes * num_slots, HUGE_PAGE_BYTES)
    fd = sealed_memfd(name, num_bytes, os.MFD_HUGETLB | _MFD_HUGE_2MB)
    try:
        return SlotsFile(fd, ArenaMap(fd, slot_bytes, num_slots), "hugetlb")
    except BaseException:
        os.close(fd)
        raise


def is_sealed(fd: int) -> bool:
    """Whether nobody can resize this memory."""
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError:  # not a memfd
        return False


def private_directory(path: Path) -> int:
    """Open a directory of our own, made if it is missing (mode 0700).

    Raises:
        OSError: it cannot be made, or others have made it, or could write to it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} is not ours alone")
    return fd


def new_file(directory_fd: int, name: str, num_bytes: int) -> int:
    """Make a file, in place of an older one. It takes memory only as its pages are used.

    Raises:
        OSError: there is no room for it; nobody could be told so later, at a page's first use.
    """
    remove_file(directory_fd, name)
    space = os.fstatvfs(directory_fd)
    free_bytes = space.f_bavail * space.f_frsize
    if space.f_blocks and free_bytes < num_bytes:  # 0 blocks: a file system without a limit
        raise OSError(errno.ENOSPC, f"{free_bytes} bytes are free, not {num_bytes}")
    fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory_fd)
    try:
        os.ftruncate(fd, align_up(num_bytes, max(os.fstat(fd).st_blksize, SECTOR_BYTES)))
    except BaseException:
        os.close(fd)
        remove_file(directory_fd, name)
        raise
    return fd


def open_file(directory_fd: int, name: str) -> int:
    """Open a file that an earlier kvd has made.

    Raises:
        UnfitArenaError: it is not a file of ours alone.
        OSError: it cannot be opened.
    """
    fd = os.open(name, _OPEN_FLAGS | os.O_NONBLOCK, dir_fd=directory_fd)
    status = os.fstat(fd)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    if not ours or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise UnfitArenaError(f"file {name} is not ours alone")
    return fd


def remove_file(directory_fd: int, name: str) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory_fd)
