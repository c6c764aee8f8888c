"""Check that no setting demands more memory or disk than this machine has."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared.config.settings import invalid_settings
from shared.types.units import format_bytes


@dataclass(frozen=True)
class Demand:
    """The memory or disk that one setting demands.

    Attributes:
        key: the setting's dotted key.
        num_bytes: bytes; None: what is available ("auto", "none").
        directory: a directory on the disk; None: memory.
        instead: a value that can be set instead, beside a smaller size.
    """

    key: str
    num_bytes: int | None
    directory: Path | None = None
    instead: str = ""


def check_room(demands: Iterable[Demand]) -> None:
    """Refuse settings that demand more than the whole machine has, free or used.

    Raises:
        InvalidSettingsError: some do; each is named.
    """
    problems = []
    for demand in demands:
        room = _memory_bytes() if demand.directory is None else _disk_bytes(demand.directory)
        if demand.num_bytes is not None and room is not None and demand.num_bytes > room:
            where = "memory" if demand.directory is None else f"disk under {demand.directory}"
            problems.append(
                f"{demand.key} = {format_bytes(demand.num_bytes)} is more than the "
                f"{format_bytes(room)} of {where} of this machine: write "
                f"less{demand.instead and f', or {demand.instead}'}"
            )
    if problems:
        raise invalid_settings(problems)


def _memory_bytes() -> int:
    return psutil.virtual_memory().total


def _disk_bytes(directory: Path) -> int | None:
    """Return the size of the file system of a directory, existing or not; None: not known."""
    for path in (directory, *directory.absolute().parents):
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        return found.f_blocks * found.f_frsize or None  # 0: a file system without a size
    return None
