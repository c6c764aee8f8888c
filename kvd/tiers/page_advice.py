"""Memory advice to the kernel about a mapping: huge pages, NUMA node, immediate allocation.

Also reports how many huge pages a mapping really has: the kernel need not follow the advice.

These functions call libc. Python's mmap has no mbind, and holds the GIL during madvise: allocating
64 MiB would stop the event loop for 20 ms.
"""

import ctypes
import os
import platform
from pathlib import Path

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14: allocate as if every page were written; contents stay
MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}  # system call numbers
_MAX_NODE = 1023
_SMAPS = Path("/proc/self/smaps")
_HUGE = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")  # lines of smaps

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def ask_huge_pages(memory: memoryview) -> None:
    """Advise the kernel to use transparent huge pages where it can.

    Raises:
        OSError: the kernel has no transparent huge pages for this memory.
    """
    _madvise(memory, MADV_HUGEPAGE)


def populate(memory: memoryview) -> None:
    """Allocate every page of page-aligned memory.

    Raises:
        OSError: EINVAL: the kernel does not support this; otherwise there is no memory left.
    """
    _madvise(memory, MADV_POPULATE_WRITE)


def bind_to_node(memory: memoryview, node: int) -> None:
    """Allocate the mapping's pages on one NUMA node from now on, for every process.

    Raises:
        OSError: the node does not exist, or the machine has no NUMA.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node <= _MAX_NODE:
        raise OSError(f"memory cannot be bound to NUMA node {node} on {platform.machine()}")
    mask = node_mask(node)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(_address(memory)))
    sizes = (ctypes.c_ulong(memory.nbytes), ctypes.c_int(MPOL_BIND), mask)
    _check(_libc.syscall(*arguments, *sizes, ctypes.c_ulong(_MAX_NODE + 1), ctypes.c_uint(0)))


def node_mask(node: int) -> "ctypes.Array[ctypes.c_ulong]":
    """Return the kernel's set of NUMA nodes with only `node` in it: a bit per node, 64 a word."""
    mask = (ctypes.c_ulong * (_MAX_NODE // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    return mask


def huge_bytes(memory: memoryview) -> int:
    """Return how many bytes of a mapping are in transparent huge pages now.

    The kernel visits every page: about a second for 100 GB of small pages.

    Raises:
        OSError: /proc cannot be read.
    """
    first = _address(memory)
    found, is_inside = 0, False
    with _SMAPS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            word, _, value = line.partition(" ")
            if not word.endswith(":"):  # the first line of a mapping: its addresses
                start, end = (int(address, 16) for address in word.split("-"))
                is_inside = start < first + memory.nbytes and first < end
            elif is_inside and word in _HUGE:
                found += int(value.split()[0]) * 1024
    return found


def _madvise(memory: memoryview, advice: int) -> None:
    _check(_libc.madvise(_address(memory), memory.nbytes, advice))


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
