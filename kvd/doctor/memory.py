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
    newer = "use Linux 5.4 or later, or permit the call in the sandbox (seccomp) that kvd runs in"
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
            f"kvd cannot allocate memory on NUMA node {node} ({error}), so engines cannot attach",
            'set dram.numa_node to a node that numactl --hardware lists, or to "any"',
        )
    else:
        yield ok("numa_node", f"kvd can allocate memory on NUMA node {node}")


def check_cuda(machine: Machine, dev: Path = DEV) -> Iterator[Finding]:
    """Check that an engine of this user can open the GPUs."""
    devices = sorted(path for path in dev.glob("nvidia[0-9]*"))
    control = dev / "nvidiactl"
    closed = [p for p in (control, *devices) if p.exists() and not may_open(p)]
    if not machine.has_cuda():
        if devices:
            yield problem(
                "cuda",
                f"{devices[0]} exists, but no CUDA driver is loaded",
                "load the driver: modprobe nvidia (in a container: on the host)",
            )
        else:
            yield ok("cuda", "there is no GPU: engines compute on the CPU")
    elif not devices or not control.exists():
        yield problem(
            "cuda",
            "a CUDA driver is loaded, but its devices are not visible here",
            "in a container, run it with --gpus all; otherwise run: nvidia-modprobe -c 0 -u",
        )
    elif closed:
        yield problem(
            "cuda",
            f"uid {os.geteuid()} may not open {closed[0]}",
            f"add the engine's user to the group {_group_of(closed[0])}",
        )
    elif not (dev / "nvidia-uvm").exists():
        yield warning(
            "cuda",
            f"there are {len(devices)} GPUs, but {dev}/nvidia-uvm is missing",
            "load it: nvidia-modprobe -c 0 -u",
        )
    else:
        yield ok("cuda", f"this user can open {len(devices)} GPUs")


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
    what = f"the DRAM tier of a layout may grow to {format_bytes(wanted)}"
    lower = "lower dram.bytes (or dram.total_bytes)"
    if wanted > total:
        yield problem("memory", f"{what}, but the machine has {format_bytes(total)}", lower)
    elif bound is not None and wanted > bound:
        yield problem(
            "memory",
            f"{what}, but this control group may use {format_bytes(bound)}",
            f"{lower}, or raise MemoryMax= (in a container: its memory limit)",
        )
    elif wanted > available:
        yield warning(
            "memory",
            f"{what}, but only {format_bytes(available)} are available now",
            f"{lower}, or stop other programs that use memory; if kvd is already running, it "
            "is kvd itself that uses it",
        )
    else:
        yield ok("memory", f"{what}, and {format_bytes(available)} are available")


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
        yield ok("swap", "kvd is never swapped out (MemorySwapMax=0)")
    else:
        yield warning(
            "swap",
            f"the machine has {format_bytes(swap)} of swap, so keys and values of "
            "conversations may be written to it",
            "set MemorySwapMax=0 in the units (kvd install-units does), run swapoff -a, or "
            "encrypt the swap",
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
            f"this user cannot write to dram.directory {directory}",
            'mount a tmpfs there, set another dram.directory, or set dram.keep = "none"',
        )
        return
    kind = file_system_of(directory, machine.proc)
    space = os.statvfs(directory)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    if kind not in MEMORY_FILE_SYSTEMS:
        yield warning(
            "shared_memory",
            f"dram.directory {directory} is on {kind}, which is not memory",
            "set it to a directory on a tmpfs, such as /dev/shm",
        )
    elif wanted > size:
        yield problem(
            "shared_memory",
            f"{directory} has a size of {format_bytes(size)}, but the DRAM tier may grow to "
            f"{format_bytes(wanted)}",
            f"run: mount -o remount,size={ceil_div(wanted, 1 << 20) + 64}M {directory} (in a "
            "container, use --shm-size); or lower dram.bytes",
        )
    elif wanted > free:
        yield warning(
            "shared_memory",
            f"{directory} has {format_bytes(free)} free, but the DRAM tier may grow to "
            f"{format_bytes(wanted)}",
            f"remove other files there (see: ls -l {directory}); if kvd is already running, "
            "they are kvd's own",
        )
    else:
        yield ok("shared_memory", f"{directory} is on {kind}, with {format_bytes(free)} free")


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
            f'dram.hugepages = "on", but only {format_bytes(pool_bytes)} of '
            f"{format_bytes(wanted)} are free in the pool of huge pages, so engines cannot "
            "attach",
            f'run: sysctl vm.nr_hugepages={num_pages}; or set dram.hugepages = "auto"',
        )
    elif pool_bytes >= wanted:
        yield ok("huge_pages", f"the pool of huge pages has {format_bytes(pool_bytes)} free")
    elif mode in ("never", "deny", ""):
        yield warning(
            "huge_pages",
            f"shared memory gets no huge pages (shmem_enabled is {mode or 'missing'}), so "
            "copies of large histories are slower",
            f"run: echo advise > {machine.sys}/kernel/mm/transparent_hugepage/shmem_enabled; "
            f"or: sysctl vm.nr_hugepages={num_pages}",
        )
    else:
        yield ok("huge_pages", f"shared memory gets transparent huge pages (mode {mode})")


def check_locked_memory(
    settings: Settings, machine: Machine, limits: ProcessLimits
) -> Iterator[Finding]:
    """Check that this user's engines on a GPU may lock the arena in memory."""
    limit = limits.locked_bytes
    wanted = dram_bytes(settings.dram.bytes)
    if limit is None or limit >= wanted or limits.is_root or not machine.has_cuda():
        limit_text = "no bound" if limit is None else format_bytes(limit)
        yield ok("locked_memory", f"this user may lock in memory: {limit_text}")
        return
    yield problem(
        "locked_memory",
        f"an engine on a GPU has to lock the arena ({format_bytes(wanted)}) in memory, "
        f"but its limit is {format_bytes(limit)}",
        "raise the limit: ulimit -l unlimited (limits.conf: memlock), "
        "LimitMEMLOCK=infinity in the engine's unit, or --ulimit memlock=-1 for its "
        "container",
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
