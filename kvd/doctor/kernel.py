"""The kernel and the GPU: what kvd and its engines need of them, tried out."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from kvd.doctor.finding import Finding, ok, problem, warning
from kvd.doctor.machine import Machine, may_open
from kvd.tiers.page_advice import bind_to_node

DEV = Path("/dev")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def check_kernel() -> Iterator[Finding]:
    """Processes that can be watched, memory that can be sealed."""
    release = os.uname().release
    newer = "run Linux 5.4 or later, or allow it in the sandbox (seccomp) that this runs in"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        yield problem("kernel", f"pidfd_open does not work on Linux {release} ({error})", newer)
    try:
        fd = os.memfd_create("kvd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, 4096)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            os.close(fd)
    except (OSError, AttributeError) as error:
        yield problem("kernel", f"memfds cannot be sealed on Linux {release} ({error})", newer)
    else:
        yield ok("kernel", f"Linux {release}")


def check_numa(node: int | None) -> Iterator[Finding]:
    """Is there the NUMA node that dram.numa_node names?"""
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
    """Can an engine of this user see the GPUs?"""
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
