"""The identity of a volume: a random id in a file of its directory, which the index names, too.

That a directory exists proves nothing. Until a disk is mounted, its mount point is an empty
directory; after a change of disks it holds another volume. So the extents of the index's rows are
read and reused only in the volume whose id the index names.

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
    """A volume cannot be used as it is; the message says why in one line."""


def identify(directory: Path, expected: str, faults: Faults, *, holds_rows: bool) -> str:
    """Identify the volume in a directory, or create one.

    Args:
        directory: directory of the volume; created only if the index has no blocks of it.
        expected: id that the index names; "" if it names none.
        faults: faults that tests inject, see kvd/tiers/faults.py.
        holds_rows: whether the index has blocks of the volume.

    Returns:
        The volume's id; "" if it has none and the disk is too full to write one.

    Raises:
        UnusableVolumeError: the directory is not the volume that the index describes.
        OSError: the directory cannot be created, read or written.
    """
    if holds_rows:
        _check_directory(directory)
    else:
        make_directory(directory, faults)
    found = _read_id(directory)
    if expected and found and found != expected:
        raise UnusableVolumeError(
            f"{directory} contains another volume ({found[:8]}, not {expected[:8]})"
        )
    if expected and not found and holds_rows:
        raise UnusableVolumeError(f"the volume is missing from {directory}: there is no {ID_NAME}")
    return found or _write_id(directory, faults)


def make_directory(directory: Path, faults: Faults) -> None:
    """Create a directory and its parents, durably.

    Raises:
        OSError: the directory cannot be created.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for created in missing:
        sync_directory(created.parent, faults)


def remove_volume(directory: Path) -> None:
    """Remove a volume's directory, unless it holds more than the id.

    Raises:
        OSError: the directory holds other files, or cannot be removed.
    """
    if all(path.name == ID_NAME for path in directory.iterdir()):
        (directory / ID_NAME).unlink()
    directory.rmdir()


def sync_directory(directory: Path, faults: Faults) -> None:
    """Make new names in a directory durable: fsync of a file does not include its name."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        faults.fsync(fd)
    finally:
        os.close(fd)


def _check_directory(directory: Path) -> None:
    """Check that a directory exists and can be read.

    Raises:
        UnusableVolumeError: the directory does not exist.
        OSError: the directory cannot be read.
    """
    try:
        next(directory.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableVolumeError(f"the directory {directory} does not exist") from error


def _read_id(directory: Path) -> str:
    """Return the id in a directory; "" if there is none.

    Raises:
        UnusableVolumeError: the id is damaged.
        OSError: the id cannot be read.
    """
    try:
        text = (directory / ID_NAME).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return ""
    if len(text) != 2 * ID_BYTES or not set(text) <= set("0123456789abcdef"):
        raise UnusableVolumeError(f"{directory / ID_NAME} is damaged")
    return text


def _write_id(directory: Path, faults: Faults) -> str:
    """Give a volume an id, and return it; return "" if the disk is full.

    The file is written under another name and then renamed: after a kill it is complete or missing.
    """
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
