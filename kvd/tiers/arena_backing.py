"""Backings of an arena: the memory of its slots and journal, and how the next kvd gets them.

    fdstore   sealed memfds in systemd's fd store, kvd-<layout>-slots and kvd-<layout>-journal
    file      <dram.directory>/kvd-<digest of the state directory>/<layout>.slots and .journal
    none      sealed memfds that end with kvd and its engines

Other processes may have created what lies in a shared directory. So a directory or file that is
not owned by kvd's user alone is refused, and sizes are read from the open descriptor.
"""

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvd.host.sealed_memory import sealed_memfd
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.journal import UnfitArenaError
from shared.kvd_client.arena_map import ArenaMap
from shared.process import systemd
from shared.process.log import get_logger
from shared.types.units import SECTOR_BYTES, align_up

PARTS = ("slots", "journal")
HUGE_PAGE_BYTES = 2 << 20
_MFD_HUGE_2MB = 21 << 26  # log2 of the page size, as in memfd_create(2)
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW

log = get_logger(__name__)


class ArenaBacking(Protocol):
    """A way to get memory for arenas and, perhaps, to keep it for the next kvd.

    Arenas are named by their layout's fingerprint; a part is one of PARTS.
    """

    @property
    def name(self) -> str:
        """Value of the setting dram.keep that selects this backing."""

    @property
    def is_sealed(self) -> bool:
        """Whether no process can resize the files."""

    def new_file(self, layout: str, part: str, num_bytes: int) -> int:
        """Create memory for one part of an arena, and return its descriptor."""

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """Leave both parts of an arena for the next kvd."""

    def find(self) -> dict[str, dict[str, int]]:
        """Return the files of earlier kvds: layout → part → descriptor. Called at start only."""

    def remove(self, layout: str) -> None:
        """Remove an arena from where the next kvd would find it."""


class UnkeptBacking:
    """Sealed memfds that end with the processes that hold them."""

    name = "none"
    is_sealed = True

    def new_file(self, layout: str, part: str, num_bytes: int) -> int:
        """See ArenaBacking."""
        return sealed_memfd(f"kvd-{layout}-{part}", num_bytes)

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """See ArenaBacking."""

    def find(self) -> dict[str, dict[str, int]]:
        """See ArenaBacking."""
        return {}

    def remove(self, layout: str) -> None:
        """See ArenaBacking."""


class FdStoreBacking(UnkeptBacking):
    """Sealed memfds that systemd keeps in its fd store."""

    name = "fdstore"

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """See ArenaBacking."""
        if not systemd.store_fds({_stored_name(layout, part): fd for part, fd in fds.items()}):
            log.warning("dram_not_kept", reason="systemd did not accept the file descriptors")

    def find(self) -> dict[str, dict[str, int]]:
        """See ArenaBacking. Descriptors whose names are not kvd's are closed."""
        found: dict[str, dict[str, int]] = {}
        for name, fd in systemd.stored_fds().items():
            prefix, _, suffix = name.partition("-")
            layout, _, part = suffix.rpartition("-")
            if prefix == "kvd" and part in PARTS and layout:
                found.setdefault(layout, {})[part] = fd
            else:
                os.close(fd)
        return found

    def remove(self, layout: str) -> None:
        """See ArenaBacking."""
        systemd.remove_fds(_stored_name(layout, part) for part in PARTS)


class DirectoryBacking:
    """A private directory in memory, one per state directory, whose lock guards it too."""

    name = "file"
    is_sealed = False

    def __init__(self, parent: Path, state_dir: Path, faults: Faults) -> None:
        digest = hashlib.blake2b(os.fsencode(state_dir.resolve()), digest_size=8).hexdigest()
        self.path = parent / f"kvd-{digest}"
        self._faults = faults

    def new_file(self, layout: str, part: str, num_bytes: int) -> int:
        """See ArenaBacking.

        Raises:
            OSError: the directory is not private to kvd's user, or has no room for the file.
        """
        with self._open_directory() as directory_fd:
            return new_file(directory_fd, f"{layout}.{part}", num_bytes)

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """See ArenaBacking. Files in the directory stay without further steps."""

    def find(self) -> dict[str, dict[str, int]]:
        """See ArenaBacking. A file that is not private to kvd's user counts as missing."""
        found: dict[str, dict[str, int]] = {}
        if not self.path.is_dir():
            return found
        try:
            with self._open_directory() as directory_fd:
                for name in sorted(path.name for path in self.path.iterdir()):
                    layout, _, part = name.rpartition(".")
                    if part in PARTS and layout:
                        parts = found.setdefault(layout, {})
                        try:
                            parts[part] = open_file(directory_fd, name)
                        except (OSError, UnfitArenaError) as error:
                            log.warning("arena_file_refused", file=name, error=str(error))
        except OSError as error:
            log.warning("arena_directory_refused", directory=str(self.path), error=str(error))
        return found

    def remove(self, layout: str) -> None:
        """See ArenaBacking. The directory is removed with its last file."""
        if not self.path.is_dir():
            return
        with contextlib.suppress(OSError), self._open_directory() as directory_fd:
            for part in PARTS:
                remove_file(directory_fd, f"{layout}.{part}")
                self._faults.reach(WritePoint.ARENA_REMOVED)
            self.path.rmdir()

    def kept_bytes(self) -> int:
        """Return the bytes of memory that the files take up."""
        try:
            return sum(path.stat().st_blocks * 512 for path in self.path.iterdir())
        except OSError:  # the directory is missing, or another user's
            return 0

    @contextmanager
    def _open_directory(self) -> Iterator[int]:
        directory_fd = private_directory(self.path)
        try:
            yield directory_fd
        finally:
            os.close(directory_fd)


def _stored_name(layout: str, part: str) -> str:
    return f"kvd-{layout}-{part}"


@dataclass(frozen=True)
class SlotsFile:
    """The mapped memory of an arena's slots; `pages` as in Arena."""

    fd: int
    slots: ArenaMap
    pages: str


def huge_memfd(name: str, slot_bytes: int, num_slots: int) -> SlotsFile:
    """Create and map a memfd of huge pages.

    The mapping reserves the pages, so that no later access can fail (SIGBUS).

    Raises:
        OSError: the machine has not enough free huge pages.
    """
    num_bytes = align_up(slot_bytes * num_slots, HUGE_PAGE_BYTES)
    fd = sealed_memfd(name, num_bytes, os.MFD_HUGETLB | _MFD_HUGE_2MB)
    return map_slots(fd, slot_bytes, num_slots, "hugetlb")


def map_slots(fd: int, slot_bytes: int, num_slots: int, pages: str = "") -> SlotsFile:
    """Map a file of slots; close it if that fails. `pages` as in Arena."""
    try:
        return SlotsFile(fd, ArenaMap(fd, slot_bytes, num_slots), pages)
    except BaseException:
        os.close(fd)
        raise


def private_directory(path: Path) -> int:
    """Open a directory that only kvd's user may enter; create it (mode 0700) if it is missing.

    Raises:
        OSError: the directory cannot be created, another user has created it, or others have
            access to it.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(f"{path} belongs to another user, or is open to others")
    return fd


def new_file(directory_fd: int, name: str, num_bytes: int) -> int:
    """Create a file of `num_bytes`. It takes memory only as its pages are used.

    Free space is checked here: when a page is first used and there is none, the process gets
    SIGBUS instead of an error.

    Raises:
        OSError: the file exists already, or there is no room for it.
    """
    space = os.fstatvfs(directory_fd)
    free_bytes = space.f_bavail * space.f_frsize
    if space.f_blocks and free_bytes < num_bytes:  # 0 blocks: a file system without a limit
        raise OSError(errno.ENOSPC, f"only {free_bytes} bytes are free, not {num_bytes}")
    fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory_fd)
    try:
        os.ftruncate(fd, align_up(num_bytes, max(os.fstat(fd).st_blksize, SECTOR_BYTES)))
    except BaseException:
        os.close(fd)
        remove_file(directory_fd, name)
        raise
    return fd


def open_file(directory_fd: int, name: str) -> int:
    """Open a file that an earlier kvd has created.

    Raises:
        UnfitArenaError: the file is not private to kvd's user.
        OSError: the file cannot be opened.
    """
    fd = os.open(name, _OPEN_FLAGS | os.O_NONBLOCK, dir_fd=directory_fd)
    status = os.fstat(fd)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    if not is_own or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise UnfitArenaError(f"file {name} belongs to another user, or is open to others")
    return fd


def remove_file(directory_fd: int, name: str) -> None:
    """Remove a file if it exists; errors are ignored."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory_fd)
