"""The process's memory: it is faulted in ahead of use, and reused rather than freed.

Fresh memory costs a page fault every few kilobytes, more than most of what is done in it, and many
times more where a virtual machine's host has yet to find the page. Three places save that:

1. The heap (`keep_freed_memory`). Every layer of a step makes tensors of some megabytes and frees
   them. By default the C library gives such memory back to the system at once, or not, depending on
   what else lies beside it, and the next layer has it faulted in and zeroed anew: up to 1 % of a
   step.
2. Regions of working KV (`allocate_region`, `populate`). They are written once and then read once
   per token, too much for any cache: huge pages save most page faults of the one and most address
   lookups of the other. Even so a copy into fresh memory takes 1.5 times as long, in a virtual
   machine up to 30 times: `populate` pays that before anybody waits for it.
3. Intermediate results (`ThreadScratch`): memory of each thread, which only grows.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from shared.process.dumps import exclude_from_dumps
from shared.types.units import MIB, align_up

HUGE_PAGE_BYTES = 2 * MIB
POPULATE_STEP_BYTES = 64 * MIB  # 3 to 150 ms: so long may stopping take
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not know it

# Of mallopt (glibc's malloc.h); other C libraries have no such function, and no such habit.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1024 * MIB  # free memory at a heap's end, above which it goes back to the system
HEAP_BYTES = 32 * MIB  # larger pieces are mapped one by one; glibc's own bound


def keep_freed_memory() -> bool:
    """Have the heap keep freed memory, from now on and in every thread.

    Returns:
        whether the C library does.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # Whichever is set, glibc adapts neither by itself any more: so both are.
    is_kept = [
        mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES),
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES),
    ]
    return all(is_kept)


def allocate_region(num_items: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate a flat tensor; pages that are never written cost address space only.

    On the CPU it is a mapping of its own, which is left out of core dumps.
    """
    num_bytes = num_items * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.empty(num_items, device=device, dtype=dtype)
    page_bytes = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
    memory = mmap.mmap(
        -1, align_up(num_bytes, page_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    exclude_from_dumps(memory)
    with suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=num_items)


def populate(region: Tensor, is_stopped: Callable[[], bool]) -> int:
    """Fault in the region's pages, whatever they hold; block, but no other Python thread.

    Args:
        region: the memory, from `allocate_region`.
        is_stopped: called before each step of POPULATE_STEP_BYTES; True ends it.

    Returns:
        bytes that are there now; 0 if the system cannot, which costs speed only.
    """
    num_bytes = region.numel() * region.itemsize
    if region.device.type != "cpu" or num_bytes < HUGE_PAGE_BYTES:
        return 0
    # Through ctypes, which releases the interpreter lock; the mmap module's madvise keeps it.
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_done = 0
    while num_done < num_bytes and not is_stopped():
        step = min(POPULATE_STEP_BYTES, num_bytes - num_done)
        if madvise(region.data_ptr() + num_done, step, _MADV_POPULATE_WRITE) != 0:
            break
        num_done += step
    return num_done


class ThreadScratch(threading.local):
    """One growing tensor per thread; each thread sees its own.

    Invariant: what `take` returned is overwritten by the same thread's next use of the same
    scratch, and by nobody else.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Store device and dtype of the tensors; `threading.local` repeats this in each thread."""
        self._device = device
        self._dtype = dtype
        self._flat: Tensor | None = None

    def take(self, *sizes: int) -> Tensor:
        """View the first items as a contiguous tensor of these sizes; they hold garbage."""
        num_items = prod(sizes)
        if self._flat is None or self._flat.numel() < num_items:
            with torch.inference_mode(mode=False):  # else later uses outside of it would be refused
                self._flat = torch.empty(num_items, device=self._device, dtype=self._dtype)
        return self._flat[:num_items].view(sizes)


def placed_on(device: torch.device, numbers: Tensor) -> Tensor:
    """Put numbers on a device, by the current stream; the host does not wait for it."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def copied_to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, once it is there.

    From a device it goes to memory that is locked in place, which it reaches at the bus's speed and
    which torch keeps for the next one.
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)
