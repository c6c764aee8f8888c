"""A step's tensors are allocated in the heap, and not in separate mappings."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference_svc.runtime import memory
from inference_svc.runtime.memory import (
    ALIGNMENT,
    HEAP_BYTES,
    HUGE_PAGE_BYTES,
    REGION_BYTES,
    RegionTensors,
    ThreadScratch,
    allocate_region,
    keep_freed_memory,
    populate,
)

KERNEL = tuple(map(int, platform.release().split(".")[:2]))

PROGRAM = f"""
import ctypes
from pathlib import Path
from inference_svc.runtime.memory import keep_freed_memory

malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p


def is_in_heap():
    address = malloc(ctypes.c_size_t({HEAP_BYTES // 2}))
    maps = Path("/proc/self/maps").read_text().splitlines()
    heap = next(line for line in maps if "[heap]" in line)
    first, end = (int(bound, 16) for bound in heap.split()[0].split("-"))
    return first <= address < end


before = is_in_heap()
assert keep_freed_memory()
print(before, is_in_heap())
"""


IS_GLIBC = platform.libc_ver()[0] == "glibc"


@pytest.mark.skipif(not IS_GLIBC, reason="this C library has no such setting")
def test_whether_freed_memory_is_kept_is_reported(monkeypatch):
    """Other C libraries lack the function, and the problem."""
    assert keep_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    assert not keep_freed_memory()


@pytest.mark.skipif(not IS_GLIBC, reason="this C library has no such setting")
def test_large_tensors_are_allocated_in_the_heap():
    """By default a process maps large tensors separately, and unmaps them when they are freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]


def test_scratch_is_reallocated_only_if_it_is_too_small():
    """Each use may take all of it, with the requested shape."""
    scratch = ThreadScratch(torch.device("cpu"), torch.float32)
    first = scratch.take(3, 4)
    assert (first.shape, first.dtype, first.is_inference()) == ((3, 4), torch.float32, False)
    for sizes in ((12,), (2, 6), (5,)):
        view = scratch.take(*sizes)
        assert (view.shape, view.data_ptr()) == (sizes, first.data_ptr())
    assert scratch.take(13).data_ptr() != first.data_ptr()
    assert scratch.take(2, 6).untyped_storage().nbytes() == 13 * 4


def test_tensors_of_a_region_lie_beside_each_other():
    """And begin where a cache's line does; a large one has a region of its own."""
    regions = RegionTensors()
    first = regions.take((3, 5), torch.float32)
    second = regions.take((7,), torch.bfloat16)
    large = regions.take((REGION_BYTES + 1,), torch.uint8)
    assert (first.shape, first.dtype) == ((3, 5), torch.float32)
    assert (second.shape, second.dtype) == ((7,), torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    assert large.data_ptr() % ALIGNMENT == 0
    assert large.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == 15


def test_a_region_is_freed_with_the_last_of_its_tensors():
    regions = RegionTensors()
    tensors = [regions.take((REGION_BYTES // 2,), torch.uint8) for _ in range(2)]
    address = f"{tensors[0].data_ptr():x}-"
    del regions
    del tensors[0]
    assert address in Path("/proc/self/maps").read_text()
    tensors.clear()
    assert address not in Path("/proc/self/maps").read_text()


@pytest.mark.skipif(KERNEL < (5, 14), reason="this kernel cannot allocate pages beforehand")
def test_pages_are_allocated_in_steps(monkeypatch):
    """All of them, or as many steps as there were before the stop."""
    monkeypatch.setattr(memory, "POPULATE_STEP_BYTES", HUGE_PAGE_BYTES)
    region = allocate_region(5 * HUGE_PAGE_BYTES // 8, torch.device("cpu"), torch.float32)
    assert populate(region, lambda: False) == 5 * HUGE_PAGE_BYTES // 2
    answers = iter([False, False, True])
    assert populate(region, lambda: next(answers)) == 2 * HUGE_PAGE_BYTES


def flags_at(address):
    """Return the kernel's description of the mapping at an address."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            first, end = (int(bound, 16) for bound in name.split("-"))
            is_here = first <= address < end
        elif is_here and name == "VmFlags:":
            return set(rest)
    return set()


def test_regions_have_large_pages_and_are_in_no_core_dump():
    """Conversations must not be in crash dumps."""
    region = allocate_region(3 * HUGE_PAGE_BYTES // 4, torch.device("cpu"), torch.float32)
    flags = flags_at(region.data_ptr())
    assert "dd" in flags
    if Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags
