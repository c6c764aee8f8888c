"""Settings that demand more memory or disk than this machine has: they can never be met."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.config.settings import invalid
from shared.types.units import format_bytes


@dataclass(frozen=True)
class Demand:
    """The memory or disk that one setting demands.

    Attributes:
        key: the setting's dotted key.
        num_bytes: bytes; None: whatever there is ("auto", "none").
        directory: a directory on the disk; None: memory.
        instead: a value that may be written in its place, beside a smaller size.
    """

    key: str
    num_bytes: int | None
    directory: Path | None = None
    instead: str = ""


def check_room(demands: Iterable[Demand]) -> None:
    """Refuse settings that demand more than the whole machine has, used or not.

    Raises:
        InvalidSettingsError: naming each.
    """
    problems = []
    for one in demands:
        room = _memory_bytes() if one.directory is None else _disk_bytes(one.directory)
        if one.num_bytes is not None and room is not None and one.num_bytes > room:
            where = "memory" if one.directory is None else f"disk under {one.directory}"
            problems.append(
                f"{one.key} = {format_bytes(one.num_bytes)}: this machine has {format_bytes(room)}"
                f" of {where}, write less{one.instead and f', or {one.instead}'}"
            )
    if problems:
        raise invalid(problems)


def _memory_bytes() -> int:
    return psutil.virtual_memory().total


def _disk_bytes(directory: Path) -> int | None:
    """Size of the file system that a directory is on, or will be; None where nobody can say."""
    for path in (directory, *directory.absolute().parents):
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        return found.f_blocks * found.f_frsize or None  # 0: a file system without a size
    return None
