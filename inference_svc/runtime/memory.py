"""Process memory: faulted in ahead of use, and reused instead of freed.

Fresh memory costs a page fault every few kilobytes. That is more than most work done in it, and
many times more where a virtual machine's host has yet to find the page. Four places avoid it:

1. The heap (`keep_freed_memory`). Every layer of a step makes tensors of some megabytes and frees
   them. By default the C library may give such memory back to the system at once, depending on
   what lies beside it. The next layer then has it faulted in and zeroed again: up to 1 % of a step.
2. Regions of working KV (`allocate_region`, `populate`). They are written once and then read once
   per token, and are too large for any cache. Huge pages save most page faults of the write and
   most address lookups of the reads. Even so a copy into fresh memory takes 1.5 times as long, in
   a virtual machine up to 30 times: `populate` pays that before a request waits for it.
3. Packed weights (`RegionTensors`). A decode step reads each of them once, as fast as memory can,
   and takes a quarter longer if the processor has to look up an address every four kilobytes.
4. Intermediate results (`ThreadScratch`): one buffer per thread, which only grows.
"""

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from shared.process.dumps import exclude_from_dumps
from shared.types.units import MIB, align_up

HUGE_PAGE_BYTES = 2 * MIB
REGION_BYTES = 64 * MIB  # of a region that tensors share
ALIGNMENT = 64  # bytes of a cache's line, where such tensors begin
POPULATE_STEP_BYTES = 64 * MIB  # takes 3 to 150 ms, by which stopping may be delayed
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not know it

# Parameters of mallopt (glibc's malloc.h). Other C libraries lack it, and do not need it.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 1024 * MIB  # free memory at a heap's end, above which it goes back to the system
HEAP_BYTES = 32 * MIB  # larger allocations are mapped one by one; glibc's upper bound


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory, from now on and in every thread.

    Returns:
        Whether the C library supports it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # Setting either threshold ends glibc's own adjustment of both, so both have to be set.
    is_kept = [
        mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES),
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES),
    ]
    return all(is_kept)


def allocate_region(num_items: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate a flat tensor, [num_items]; pages that are never written cost address space only.

    On the CPU it is a mapping of its own with huge pages, and is left out of core dumps.
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
    """Fault in the region's pages and keep their contents; other Python threads run meanwhile.

    Args:
        region: memory from `allocate_region`.
        is_stopped: called before each step of POPULATE_STEP_BYTES; True ends the call.

    Returns:
        Bytes that were faulted in; 0 if the system cannot, which costs speed only.
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


class RegionTensors:
    """Tensors on the CPU, cut one after the other from regions with huge pages.

    A region is freed with the last of its tensors.
    """

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of these sizes; its contents are undefined."""
        num_bytes = prod(sizes) * dtype.itemsize
        if num_bytes > self._rest.numel():
            region_bytes = max(num_bytes, REGION_BYTES)
            self._rest = allocate_region(region_bytes, torch.device("cpu"), torch.uint8)
        taken = self._rest[:num_bytes]
        self._rest = self._rest[align_up(num_bytes, ALIGNMENT) :]
        return taken.view(dtype).view(*sizes)


class ThreadScratch(threading.local):
    """One growing scratch tensor per thread.

    Invariant: the tensor that `take` returned is overwritten only by the same thread's next `take`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        """Store device and dtype of the tensors; `threading.local` repeats this in each thread."""
        self._device = device
        self._dtype = dtype
        self._flat: Tensor | None = None

    def take(self, *sizes: int) -> Tensor:
        """Return a contiguous tensor of these sizes; its contents are undefined."""
        num_items = prod(sizes)
        if self._flat is None or self._flat.numel() < num_items:
            # An inference tensor could not be written to outside of inference mode later.
            with torch.inference_mode(mode=False):
                self._flat = torch.empty(num_items, device=self._device, dtype=self._dtype)
        return self._flat[:num_items].view(sizes)


def copy_to_device(device: torch.device, numbers: Tensor) -> Tensor:
    """Copy a host tensor to a device on the current stream, without waiting for the copy."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host and wait for the copy.

    From a device it goes to pinned memory, which copies reach at the bus's full speed and which
    torch caches for the next call.
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)
