"""Where an arena's two files are left for the next kvd: in systemd's fd store, or in a directory.

    fdstore   sealed memfds, kvd-<layout>-slots and kvd-<layout>-journal
    file      <dram.directory>/kvd-<digest of the state directory>/<layout>.slots and .journal
    none      sealed memfds that end with kvd and its engines

What others could have put there is looked at twice: see kvd/tiers/arena_file.py.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from kvd.host import systemd
from kvd.tiers import arena_file
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.journal import UnfitArenaError
from shared.process.log import get_logger

PARTS = ("slots", "journal")

log = get_logger(__name__)


class ArenaPlace(Protocol):
    """One place."""

    @property
    def name(self) -> str:
        """As in dram.keep."""

    @property
    def is_sealed(self) -> bool:
        """Whether nobody can resize what lies there."""

    def new_file(self, layout: str, part: str, num_bytes: int) -> int:
        """Make memory for one part of an arena; return its descriptor."""

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """Leave both parts for the next kvd."""

    def found(self) -> dict[str, dict[str, int]]:
        """What earlier kvds have left: layout → part → descriptor. Once, at start."""

    def remove(self, layout: str) -> None:
        """Take an arena away."""


class Nowhere:
    """Nothing is kept."""

    name = "none"
    is_sealed = True

    def new_file(self, layout: str, part: str, num_bytes: int) -> int:
        """See ArenaPlace."""
        return arena_file.sealed_memfd(f"kvd-{layout}-{part}", num_bytes)

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """See ArenaPlace."""

    def found(self) -> dict[str, dict[str, int]]:
        """See ArenaPlace."""
        return {}

    def remove(self, layout: str) -> None:
        """See ArenaPlace."""


class FdStore(Nowhere):
    """systemd's fd store."""

    name = "fdstore"

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """See ArenaPlace."""
        if not systemd.store_fds({_stored_name(layout, part): fd for part, fd in fds.items()}):
            log.warning("dram_not_kept", reason="systemd has not taken the descriptors")

    def found(self) -> dict[str, dict[str, int]]:
        """See ArenaPlace. Descriptors whose names are not ours are closed."""
        found: dict[str, dict[str, int]] = {}
        for name, fd in systemd.stored_fds().items():
            prefix, _, rest = name.partition("-")
            layout, _, part = rest.rpartition("-")
            if prefix == "kvd" and part in PARTS and layout:
                found.setdefault(layout, {})[part] = fd
            else:
                os.close(fd)
        return found

    def remove(self, layout: str) -> None:
        """See ArenaPlace."""
        systemd.remove_fds(_stored_name(layout, part) for part in PARTS)


class ArenaDirectory:
    """A private directory in memory; one for each state directory, whose lock guards it too."""

    name = "file"
    is_sealed = False

    def __init__(self, parent: Path, state_dir: Path, faults: Faults) -> None:
        digest = hashlib.blake2b(os.fsencode(state_dir.resolve()), digest_size=8).hexdigest()
        self.path = parent / f"kvd-{digest}"
        self._faults = faults

    def new_file(self, layout: str, part: str, num_bytes: int) -> int:
        """See ArenaPlace.

        Raises:
            OSError: the directory is not ours alone, or has no room for it.
        """
        with self._opened() as directory_fd:
            return arena_file.new_file(directory_fd, f"{layout}.{part}", num_bytes)

    def keep(self, layout: str, fds: Mapping[str, int]) -> None:
        """See ArenaPlace: they lie here already."""

    def found(self) -> dict[str, dict[str, int]]:
        """See ArenaPlace. A file that is not ours alone is as good as missing."""
        found: dict[str, dict[str, int]] = {}
        if not self.path.is_dir():
            return found
        try:
            with self._opened() as directory_fd:
                for name in sorted(path.name for path in self.path.iterdir()):
                    layout, _, part = name.rpartition(".")
                    if part in PARTS and layout:
                        parts = found.setdefault(layout, {})
                        try:
                            parts[part] = arena_file.open_file(directory_fd, name)
                        except (OSError, UnfitArenaError) as error:
                            log.warning("arena_file_refused", file=name, error=str(error))
        except OSError as error:
            log.warning("arena_directory_refused", directory=str(self.path), error=str(error))
        return found

    def remove(self, layout: str) -> None:
        """See ArenaPlace. The directory goes with its last file."""
        if not self.path.is_dir():
            return
        with contextlib.suppress(OSError), self._opened() as directory_fd:
            for part in PARTS:
                arena_file.remove_file(directory_fd, f"{layout}.{part}")
                self._faults.reach(WritePoint.ARENA_REMOVED)
            self.path.rmdir()

    def kept_bytes(self) -> int:
        """Memory that its files take up."""
        try:
            return sum(path.stat().st_blocks * 512 for path in self.path.iterdir())
        except OSError:  # there is none, or it is not ours to look at
            return 0

    @contextmanager
    def _opened(self) -> Iterator[int]:
        directory_fd = arena_file.private_directory(self.path)
        try:
            yield directory_fd
        finally:
            os.close(directory_fd)


def _stored_name(layout: str, part: str) -> str:
    return f"kvd-{layout}-{part}"
