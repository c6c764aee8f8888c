"""Which volume lies in a directory: a random id in a file of it, which the index names too.

A directory that is there proves nothing: where a disk is mounted late, the mount point is an empty
directory until then, and after a change of disks it holds another volume. Extents of the index's
rows are only read, and only given to others, in the volume whose id the index names.

A volume of an earlier release has no id; it gets one when it is opened.
"""

import errno
import os
import secrets
from pathlib import Path

from kvd.tiers.faults import Faults, WritePoint
from shared.process.log import get_logger

ID_NAME = "volume.id"
ID_BYTES = 16

_FULL = {errno.ENOSPC, errno.EDQUOT}

log = get_logger(__name__)


class UnusableVolumeError(Exception):
    """A volume cannot be used as it is; one line says why."""


def identify(directory: Path, expected: str, faults: Faults, *, holds_rows: bool) -> str:
    """Find, or make, the volume in a directory.

    Args:
        directory: directory of the volume; made if nothing can be lost by it.
        expected: the id that the index names; "" if it names none.
        faults: faults that tests inject, see kvd/tiers/faults.py.
        holds_rows: whether the index says that there is something in it.

    Returns:
        Its id; "" if it has none and the disk is full.

    Raises:
        UnusableVolumeError: the directory is not the volume that the index describes.
        OSError: the directory cannot be made, read or written.
    """
    if holds_rows:
        _check_directory(directory)
    else:
        make_directory(directory, faults)
    found = _read_id(directory)
    if expected and found and found != expected:
        raise UnusableVolumeError(
            f"{directory} holds another volume ({found[:8]}, not {expected[:8]})"
        )
    if expected and not found and holds_rows:
        raise UnusableVolumeError(f"the volume of {directory} is not there: it has no {ID_NAME}")
    return found or _write_id(directory, faults)


def make_directory(directory: Path, faults: Faults) -> None:
    """Make a directory and those above it, and have them survive a power cut.

    Raises:
        OSError: the directory cannot be made.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        sync_directory(made.parent, faults)


def remove_volume(directory: Path) -> None:
    """Remove a volume's directory, unless something but its id is in it.

    Raises:
        OSError: there is something, or it cannot be removed.
    """
    if all(path.name == ID_NAME for path in directory.iterdir()):
        (directory / ID_NAME).unlink()
    directory.rmdir()


def sync_directory(directory: Path, faults: Faults) -> None:
    """Make the names of what is new in a directory survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        faults.fsync(fd)
    finally:
        os.close(fd)


def _check_directory(directory: Path) -> None:
    """Raise UnusableVolumeError if there is nothing, OSError if nobody can say what there is."""
    try:
        next(directory.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableVolumeError(f"{directory} is not there") from error


def _read_id(directory: Path) -> str:
    """Return the id in a directory; "" if there is none."""
    try:
        text = (directory / ID_NAME).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""
    if len(text) != 2 * ID_BYTES or not set(text) <= set("0123456789abcdef"):
        raise UnusableVolumeError(f"{directory / ID_NAME} is damaged")
    return text


def _write_id(directory: Path, faults: Faults) -> str:
    """Give a volume an id, which is there whole or not at all. A full disk has no room for it."""
    volume_id = secrets.token_hex(ID_BYTES)
    path = directory / ID_NAME
    unfinished = path.with_suffix(".new")
    try:
        with unfinished.open("w", encoding="ascii") as file:
            file.write(volume_id + "\n")
            file.flush()
            faults.fsync(file.fileno())
        faults.reach(WritePoint.VOLUME_ID_WRITTEN)
        unfinished.rename(path)
        sync_directory(directory, faults)
        faults.reach(WritePoint.VOLUME_ID_KEPT)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        log.info("volume_without_id", directory=str(directory), error=str(error))
        return ""
    return volume_id
