"""Advice for the kernel about a mapping: huge pages, a NUMA node, pages to allocate now.

And what came of it: asking for huge pages is not having them.

Called through libc, because Python's mmap has no mbind and holds the interpreter's lock during
madvise: allocating 64 MiB would stop the event loop for 20 ms.
"""

import ctypes
import os
import platform
from pathlib import Path

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23  # Linux 5.14: as if every page were written, contents are left alone
MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235}  # system call numbers
_MAX_NODE = 1023
_SMAPS = Path("/proc/self/smaps")
_HUGE = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")  # lines of smaps

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def ask_huge_pages(memory: memoryview) -> None:
    """Let the kernel use transparent huge pages where it can.

    Raises:
        OSError: the kernel cannot do so at all.
    """
    _madvise(memory, MADV_HUGEPAGE)


def populate(memory: memoryview) -> None:
    """Allocate every page of page-aligned memory.

    Raises:
        OSError: EINVAL from a kernel that does not know this; otherwise there is no memory left.
    """
    _madvise(memory, MADV_POPULATE_WRITE)


def bind_to_node(memory: memoryview, node: int) -> None:
    """Take pages that are allocated from now on, by whatever process, from one NUMA node.

    Raises:
        OSError: there is no such node, or the machine has no NUMA.
    """
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node <= _MAX_NODE:
        raise OSError(f"no memory policy for node {node} on {platform.machine()}")
    mask = node_mask(node)
    arguments = (ctypes.c_long(number), ctypes.c_void_p(_address(memory)))
    sizes = (ctypes.c_ulong(memory.nbytes), ctypes.c_int(MPOL_BIND), mask)
    _check(_libc.syscall(*arguments, *sizes, ctypes.c_ulong(_MAX_NODE + 1), ctypes.c_uint(0)))


def node_mask(node: int) -> "ctypes.Array[ctypes.c_ulong]":
    """Return a set of NUMA nodes with one in it, as the kernel reads it: a bit each, 64 a word."""
    mask = (ctypes.c_ulong * (_MAX_NODE // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    return mask


def huge_bytes(memory: memoryview) -> int:
    """Return how many bytes of a mapping are in transparent huge pages of this process now.

    The kernel looks at every page for it: about a second for 100 GB of small ones.

    Raises:
        OSError: /proc is not there to say it.
    """
    first = _address(memory)
    found, is_ours = 0, False
    with _SMAPS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):  # the head of a mapping: its addresses
                start, end = (int(address, 16) for address in word.split("-"))
                is_ours = start < first + memory.nbytes and first < end
            elif is_ours and word in _HUGE:
                found += int(rest.split()[0]) * 1024
    return found


def _madvise(memory: memoryview, advice: int) -> None:
    _check(_libc.madvise(_address(memory), memory.nbytes, advice))


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
