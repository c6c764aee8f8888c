"""What a figure was measured on: without it nobody can compare."""

import os
from pathlib import Path

import psutil

from kvd.bench.figures import Machine
from kvd.bench.floor import open_direct
from shared.measuring.machine import common_facts, shared_huge_pages
from shared.version import __version__

_LIBRARIES = ("grpcio", "numpy", "protobuf", "uvloop", "xxhash")
_RESERVED = Path("/proc/sys/vm/nr_hugepages")


def machine_facts(directory: Path) -> Machine:
    """Look at the machine and at the file system of `directory`, which must be writable."""
    device, filesystem = _mounted_at(directory)
    return Machine(
        **common_facts(_LIBRARIES),
        shared_huge_pages=shared_huge_pages(),
        reserved_huge_pages=int(_RESERVED.read_text(encoding="ascii")) if _RESERVED.exists() else 0,
        filesystem=filesystem,
        device=device,
        direct_io=_takes_direct_io(directory),
        kvd=__version__,
    )


def _mounted_at(directory: Path) -> tuple[str, str]:
    """(device, type) of the mount that a directory is on: the longest mount point above it."""
    path = directory.resolve()
    mounts = {Path(part.mountpoint): part for part in psutil.disk_partitions(all=True)}
    for candidate in (path, *path.parents):
        if candidate in mounts:
            return mounts[candidate].device, mounts[candidate].fstype
    return "", ""


def _takes_direct_io(directory: Path) -> bool:
    path = directory / "direct.probe"
    fd, is_direct = open_direct(path)
    os.close(fd)
    path.unlink()
    return is_direct
