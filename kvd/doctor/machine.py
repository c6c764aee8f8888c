"""What the machine has, and this process may: where checks look it up. Tests have another one."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SYS = Path("/sys")
_UNLIMITED = 1 << 60  # what cgroups and rlimits mean by "no bound"


@dataclass(frozen=True)
class Machine:
    """Where the machine says what it has; tests have files of their own."""

    proc: Path = PROC
    sys: Path = SYS

    def memory(self, field: str) -> int:
        """A field of /proc/meminfo, in bytes or as the number it is; 0 if there is none."""
        for line in text_of(self.proc / "meminfo").splitlines():
            name, _, value = line.partition(":")
            words = value.split()
            if name == field and words:
                return int(words[0]) * (1024 if words[-1] == "kB" else 1)
        return 0

    def cgroup_bytes(self, bound: str = "memory.max") -> int | None:
        """The lowest such bound of the control groups this process is in; None: no bound."""
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
        """What shared memory gets: "advise", "never", …; "" if the kernel does not say."""
        text = text_of(self.sys / "kernel/mm/transparent_hugepage/shmem_enabled")
        return text.partition("[")[2].partition("]")[0]

    def has_cuda(self) -> bool:
        """Whether a driver for CUDA is loaded."""
        return (self.proc / "driver/nvidia/version").exists()


@dataclass(frozen=True)
class ProcessLimits:
    """What this process may do; None: no bound."""

    locked_bytes: int | None
    open_files: int | None
    is_root: bool


def limits_of_this_process() -> ProcessLimits:
    """As the shell, or the unit, has set them."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unbounded = resource.RLIM_INFINITY
    return ProcessLimits(
        None if locked == unbounded else locked,
        None if files == unbounded else files,
        os.geteuid() == 0,
    )


def may_write(directory: Path) -> bool:
    """Whether this process may make files in a directory."""
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=True)


def may_open(path: Path) -> bool:
    """Whether this process may read and write a file."""
    return os.access(path, os.R_OK | os.W_OK, effective_ids=True)


def may_read(path: Path) -> bool:
    """Whether this process may read a file, or may see that it is not there: another matter."""
    if os.access(path, os.F_OK, effective_ids=True):
        return os.access(path, os.R_OK, effective_ids=True)
    seen = next(p for p in path.absolute().parents if os.access(p, os.F_OK, effective_ids=True))
    return os.access(seen, os.X_OK, effective_ids=True)


def is_directory(path: Path) -> bool:
    """Whether it is one, as far as this process can see."""
    try:
        return path.is_dir()
    except OSError:  # in a directory that we may not enter
        return False


def text_of(path: Path) -> str:
    """What a file of the kernel's says; "" if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
