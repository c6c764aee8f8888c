"""Files in which the machine describes itself, and the limits of this process.

Checks read them through `Machine`, for which tests substitute files of their own.
"""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")
_UNLIMITED = 1 << 60  # cgroup limits from here on mean "no limit"


@dataclass(frozen=True)
class Machine:
    """The roots of the file systems in which the kernel describes the machine."""

    proc: Path = PROC
    sys: Path = SYS

    def memory(self, field: str) -> int:
        """Return a field of /proc/meminfo, in bytes if it has a unit; 0: there is no such field."""
        for line in text_of(self.proc / "meminfo").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if name == field and words:
                return int(words[0]) * (1024 if words[-1] == "kB" else 1)
        return 0

    def cgroup_bytes(self, bound: str = "memory.max") -> int | None:
        """Return the lowest such limit of this process's control groups; None: no limit."""
        _, _, path = text_of(self.proc / "self/cgroup").strip().rpartition("0::/")
        group = self.sys / "fs/cgroup" / path
        bounds = []
        while group != self.sys / "fs":
            text = text_of(group / bound).strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                bounds.append(int(text))
            group = group.parent
        return min(bounds, default=None)

    def shared_huge_pages(self) -> str:
        """Return the huge page mode of shared memory: "advise", "never", …; "": unknown."""
        text = text_of(self.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
        return text.partition("[")[2].partition("]")[0]

    def has_cuda(self) -> bool:
        """Whether a driver for CUDA is loaded."""
        return (self.proc / "driver/nvidia/version").exists()


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a process; None: no limit."""

    locked_bytes: int | None
    open_files: int | None
    is_root: bool


def limits_of_this_process() -> ProcessLimits:
    """Return the limits that the shell or the unit has set for this process."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    return ProcessLimits(
        None if locked == unbounded else locked,
        None if files == unbounded else files,
        os.geteuid() == 0,
    )


def may_write(directory: Path) -> bool:
    """Return whether this process may create files in a directory."""
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=True)


def may_open(path: Path) -> bool:
    """Return whether this process may read and write a file."""
    return os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def may_read(path: Path) -> bool:
    """Return whether this process may read a file, or can see that it does not exist."""
    if os.access(path, os.F_OK, effective_ids=True):
        return os.access(path, os.R_OK, effective_ids=True)
    seen = next(p for p in path.absolute().parents if os.access(p, os.F_OK, effective_ids=True))
    return os.access(seen, os.X_OK, effective_ids=True)


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory, as far as this process can see."""
    try:
        return path.is_dir()
    except OSError:  # in a directory that we may not enter
        return False


def text_of(path: Path) -> str:
    """Return the text of a file of the kernel's; "": there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
