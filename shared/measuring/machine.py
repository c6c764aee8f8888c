"""What a figure was measured on: without it nobody can compare."""

import os
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def common_facts(libraries: Iterable[str]) -> dict[str, Any]:
    """What every report says of its machine, by the names of a document.

    Args:
        libraries: whose versions matter.
    """
    return {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "memory_bytes": psutil.virtual_memory().total,
        "huge_pages": private_huge_pages(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in libraries},
    }


def cpu_name() -> str:
    """The processor's name, as the kernel knows it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def private_huge_pages() -> str:
    """When private memory gets transparent huge pages: "always", "madvise" or "never"."""
    return _chosen(_HUGE_PAGES / "enabled")


def shared_huge_pages() -> str:
    """The same for shared memory: "advise", "never", …."""
    return _chosen(_HUGE_PAGES / "shmem_enabled")


def _chosen(setting: Path) -> str:
    """The mode in brackets, "always [madvise] never"; "" if the kernel has no such setting."""
    text = setting.read_text(encoding="ascii") if setting.exists() else ""
    return text.partition("[")[2].partition("]")[0]
