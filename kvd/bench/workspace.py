"""Where a run keeps its files: new directories, checked for room before, removed after."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.measuring.workspace import NoRoomError, directories
from shared.types.units import format_bytes


@dataclass(frozen=True)
class Workspace:
    """Two directories that nobody else uses.

    Attributes:
        state: on the file system to measure.
        runtime: for sockets, whose paths must be short.
    """

    state: Path
    runtime: Path


@contextmanager
def workspace(directory: Path, needed_bytes: int) -> Iterator[Workspace]:
    """Make the directories; they are removed with all that is in them, however the block ends.

    Raises:
        NoRoomError: `directory` has less room than twice what is needed.
        OSError: nothing can be made there.
    """
    free = shutil.disk_usage(directory).free
    if free < 2 * needed_bytes:
        raise NoRoomError(
            f"{directory} has {format_bytes(free)} free, the bench wants"
            f" {format_bytes(2 * needed_bytes)} and uses half of it",
            "name another directory with --directory, or measure less with --quick",
        )
    with directories(directory, "kvd-bench-") as (state, runtime):
        yield Workspace(state, runtime)


def room_of(directory: Path) -> tuple[int, int]:
    """Bytes of memory, and of disk under the directory, that are there to be used."""
    return psutil.virtual_memory().available, shutil.disk_usage(directory).free
