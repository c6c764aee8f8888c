"""Memory of the KV pool: allocated in huge pages where the system lends them, faulted in ahead.

Rows are written once and then read once per token, too much for any cache: huge pages save most
page faults of the one and most address lookups of the other. Even so a copy into fresh memory takes
1.5 times as long, in a virtual machine whose host has yet to find the page 30 times: `populate`
pays that before anybody waits for it.
"""

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from shared.process.dumps import leave_out
from shared.types.units import MIB, align_up

HUGE_PAGE_BYTES = 2 * MIB
POPULATE_STEP_BYTES = 64 * MIB  # 3 to 150 ms: so long may stopping take
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not know it


def allocate_region(num_items: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate a flat tensor; rows that are never written cost address space only.

    On the CPU it is a mapping of its own, which is left out of core dumps.
    """
    num_bytes = num_items * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.empty(num_items, device=device, dtype=dtype)
    page_bytes = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
    memory = mmap.mmap(
        -1, align_up(num_bytes, page_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    leave_out(memory)
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_items)


def populate(region: Tensor, is_stopped: Callable[[], bool]) -> int:
    """Fault in the region's pages, whatever they hold; blocks, but not other Python threads.

    Args:
        region: from `allocate_region`.
        is_stopped: asked before each step of POPULATE_STEP_BYTES.

    Returns:
        bytes that are there now; 0 if the system cannot, which costs speed only.
    """
    num_bytes = region.numel() * region.itemsize
    if region.device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return 0
    # Through ctypes, which lets go of the interpreter lock; the mmap module's madvise keeps it.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_done = 0
    while num_done < num_bytes and not is_stopped():
        step = min(POPULATE_STEP_BYTES, num_bytes - num_done)
        if madvise(region.data_ptr() + num_done, step, _MADV_POPULATE_WRITE) != 0:
            break
        num_done += step
    return num_done
