"""Checks of kernel, memory and GPU: enough memory of the kind that the settings want."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvd.config import Settings
from kvd.doctor.finding import Finding, ok, problem, warning
from kvd.doctor.machine import (
    PROC,
    Machine,
    ProcessLimits,
    is_directory,
    may_open,
    may_write,
    text_of,
)
from kvd.host.sealed_memory import sealed_memfd
from kvd.tiers.arena import dram_bytes
from kvd.tiers.arena_store import resolve_keep
from kvd.tiers.page_advice import bind_to_node
from shared.types.units import SECTOR_BYTES, ceil_div, format_bytes

DEV = Path("/dev")


def check_kernel() -> Iterator[Finding]:
    """Check that processes can be watched (pidfd) and memory can be sealed (memfd)."""
    release = os.uname().release
    newer = "run Linux 5.4 or later, or allow it in the sandbox (seccomp) that this runs in"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        yield problem("kernel", f"pidfd_open does not work on Linux {release} ({error})", newer)
    try:
        os.close(sealed_memfd("kvd-doctor", SECTOR_BYTES))
    except (OSError, AttributeError) as error:
        yield problem("kernel", f"memfds cannot be sealed on Linux {release} ({error})", newer)
    else:
        yield ok("kernel", f"Linux {release}")


def check_numa(node: int | None) -> Iterator[Finding]:
    """Check that the NUMA node in dram.numa_node exists."""
    if node is None:
        return
    import mmap

    try:
        bind_to_node(memoryview(mmap.mmap(-1, mmap.PAGESIZE)), node)
    except OSError as error:
        yield problem(
            "numa_node",
            f"memory cannot be taken from NUMA node {node} ({error}): engines are refused",
            'see numactl --hardware, and set dram.numa_node to one of them, or to "any"',
        )
    else:
        yield ok("numa_node", f"memory can be taken from NUMA node {node}")


def check_cuda(machine: Machine, dev: Path = DEV) -> Iterator[Finding]:
    """Check that an engine of this user can open the GPUs."""
    devices = sorted(path for path in dev.glob("nvidia[0-9]*"))
    control = dev / "nvidiactl"
    closed = [p for p in (control, *devices) if p.exists() and not may_open(p)]
    if not machine.has_cuda():
        if devices:
            yield problem(
                "cuda",
                f"{devices[0]} is there, but no driver is loaded",
                "load it: modprobe nvidia (in a container: the host's)",
            )
        else:
            yield ok("cuda", "no GPU: engines compute on the CPU")
    elif not devices or not control.exists():
        yield problem(
            "cuda",
            "a driver for CUDA is loaded, but its devices are not visible here",
            "in a container: run it with --gpus all; else: nvidia-modprobe -c 0 -u",
        )
    elif closed:
        yield problem(
            "cuda",
            f"{closed[0]} cannot be opened by uid {os.geteuid()}",
            f"add the engine's user to group {_group_of(closed[0])}",
        )
    elif not (dev / "nvidia-uvm").exists():
        yield warning(
            "cuda",
            f"{len(devices)} GPUs, but {dev}/nvidia-uvm is not there",
            "load it: nvidia-modprobe -c 0 -u",
        )
    else:
        yield ok("cuda", f"{len(devices)} GPUs can be opened")


def _group_of(path: Path) -> str:
    try:
        return path.group()
    except KeyError:
        return str(path.stat().st_gid)


MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")


def check_memory(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Check that the machine has the memory that dram.bytes asks for."""
    wanted = settings.dram.total_bytes or dram_bytes(settings.dram.bytes)
    total, available = machine.memory("MemTotal"), machine.memory("MemAvailable")
    bound = machine.cgroup_bytes()
    what = f"the DRAM tier of a layout is to have {format_bytes(wanted)}"
    lower = "lower dram.bytes (or dram.total_bytes)"
    if wanted > total:
        yield problem("memory", f"{what}, the machine has {format_bytes(total)}", lower)
    elif bound is not None and wanted > bound:
        yield problem(
            "memory",
            f"{what}, this control group may use {format_bytes(bound)}",
            f"{lower}, or raise MemoryMax= (the container's memory limit)",
        )
    elif wanted > available:
        yield warning(
            "memory",
            f"{what}, {format_bytes(available)} are available now",
            f"{lower}, or end what uses the memory; if kvd runs already, it is kvd",
        )
    else:
        yield ok("memory", f"{what}, {format_bytes(available)} are available")


def check_swap(machine: Machine, unit: Mapping[str, str]) -> Iterator[Finding]:
    """Check that KV in DRAM cannot be swapped to a disk.

    Args:
        machine: the machine that kvd runs on.
        unit: systemd's properties of kvd's unit; empty: it is not installed.
    """
    swap = machine.memory("SwapTotal")
    if not swap:
        yield ok("swap", "the machine has no swap")
    elif unit.get("MemorySwapMax") == "0" or machine.cgroup_bytes("memory.swap.max") == 0:
        yield ok("swap", "nothing of kvd is swapped out (MemorySwapMax=0)")
    else:
        yield warning(
            "swap",
            f"the machine has {format_bytes(swap)} of swap, where keys and values may come to lie",
            "MemorySwapMax=0 in the units (kvd install-units), swapoff -a, or encrypted swap",
        )


def check_shared_memory(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Check the directory that keeps DRAM over restarts: that it is memory, and has room."""
    keep = resolve_keep(settings.dram.keep, settings.engine_uids())
    directory = settings.dram.directory
    if keep != "file":
        yield ok("shared_memory", f'dram.keep = "{settings.dram.keep}": {directory} is not used')
        return
    wanted = settings.dram.total_bytes or dram_bytes(settings.dram.bytes)
    if not is_directory(directory) or not may_write(directory):
        yield problem(
            "shared_memory",
            f"dram.directory {directory} cannot be written to",
            'mount a tmpfs there, name another dram.directory, or set dram.keep = "none"',
        )
        return
    kind = file_system_of(directory, machine.proc)
    space = os.statvfs(directory)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if kind not in MEMORY_FILE_SYSTEMS:
        yield warning(
            "shared_memory",
            f"dram.directory {directory} is {kind}, no memory",
            "name a tmpfs, such as /dev/shm",
        )
    elif wanted > size:
        yield problem(
            "shared_memory",
            f"{directory} has {format_bytes(size)}, the DRAM tier is to have "
            f"{format_bytes(wanted)}",
            f"mount -o remount,size={ceil_div(wanted, 1 << 20) + 64}M {directory} "
            "(in a container: --shm-size), or lower dram.bytes",
        )
    elif wanted > free:
        yield warning(
            "shared_memory",
            f"{directory} has {format_bytes(free)} left, the DRAM tier is to have "
            f"{format_bytes(wanted)}",
            f"remove what lies there (see: ls -l {directory}); if kvd runs already, it is kvd's",
        )
    else:
        yield ok("shared_memory", f"{directory} is {kind} with {format_bytes(free)} left")


def check_huge_pages(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Check that there are huge pages of the kind that dram.hugepages asks for."""
    wanted = dram_bytes(settings.dram.bytes)
    page_bytes = machine.memory("Hugepagesize") or 2 << 20
    pool_bytes = machine.memory("HugePages_Free") * page_bytes
    num_taken = machine.memory("HugePages_Total") - machine.memory("HugePages_Free")
    num_pages = num_taken + ceil_div(wanted, page_bytes)
    mode = machine.shared_huge_pages()
    if settings.dram.hugepages == "off":
        yield ok("huge_pages", 'dram.hugepages = "off"')
    elif settings.dram.hugepages == "on" and pool_bytes < wanted:
        yield problem(
            "huge_pages",
            f'dram.hugepages = "on", and {format_bytes(pool_bytes)} of {format_bytes(wanted)} are '
            "free in the pool: engines are refused",
            f'sysctl vm.nr_hugepages={num_pages}, or set dram.hugepages = "auto"',
        )
    elif pool_bytes >= wanted:
        yield ok("huge_pages", f"the pool has {format_bytes(pool_bytes)} free")
    elif mode in ("never", "deny", ""):
        yield warning(
            "huge_pages",
            f"shared memory gets no huge pages (shmem_enabled is {mode or 'not there'}): copies "
            "of large histories are slower",
            f"echo advise > {machine.sys}/kernel/mm/transparent_hugepage/shmem_enabled, or "
            f"sysctl vm.nr_hugepages={num_pages}",
        )
    else:
        yield ok("huge_pages", f"transparent huge pages for shared memory: {mode}")


def check_locked_memory(
    settings: Settings, machine: Machine, limits: ProcessLimits
) -> Iterator[Finding]:
    """Check that this user's engines on a GPU may lock the arena in memory."""
    limit = limits.locked_bytes
    wanted = dram_bytes(settings.dram.bytes)
    if limit is None or limit >= wanted or limits.is_root or not machine.has_cuda():
        limit_text = "no bound" if limit is None else format_bytes(limit)
        yield ok("locked_memory", f"memory that may be locked: {limit_text}")
        return
    yield problem(
        "locked_memory",
        f"{format_bytes(limit)} may be locked in memory, an engine on a GPU locks the arena "
        f"({format_bytes(wanted)})",
        "ulimit -l unlimited (limits.conf: memlock), LimitMEMLOCK=infinity in its unit, or "
        "--ulimit memlock=-1 for its container",
    )


def file_system_of(path: Path, proc: Path = PROC) -> str:
    """Return the type of the file system of a path, such as "ext4" or "tmpfs"."""
    resolved = path.resolve()
    best, kind = -1, "unknown"
    for line in text_of(proc / "self/mounts").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        mount = Path(words[1].replace("\\040", " "))
        if resolved.is_relative_to(mount) and len(mount.parts) >= best:
            best, kind = len(mount.parts), words[2]
    return kind
