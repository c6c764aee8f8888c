"""CUDA's driver in host memory: first on the path, it gives a machine GPUs.

Their UUIDs are in FAKE_CUDA_DEVICES, with commas. Memory that is shared is a memfd; a copy is made
when its event is waited for, after FAKE_CUDA_COPY_S seconds: as late as a GPU may make it.
It refuses memory that is registered twice, and copies from or to host memory that is not registered
or device memory that is not mapped.

Names and numbers of arguments are the real ones: tests/shared/cuda/test_driver_calls.py compares.
"""

import ctypes
import itertools
import mmap
import os
import threading
import time
import uuid
from enum import IntEnum

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

DEVICES = [name for name in os.environ.get("FAKE_CUDA_DEVICES", "").split(",") if name]
COPY_S = float(os.environ.get("FAKE_CUDA_COPY_S", "0"))
GRANULARITY = 2 << 20
MAP_FIXED = 0x10
MAP_FAILED = ctypes.c_void_p(-1).value
CU_MEMHOSTREGISTER_PORTABLE = 1


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAllocationGranularity_flags(IntEnum):  # noqa: N801 - as CUDA calls it
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAccess_flags(IntEnum):  # noqa: N801
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemcpySrcAccessOrder(IntEnum):
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1


class CUstream_flags(IntEnum):  # noqa: N801
    CU_STREAM_NON_BLOCKING = 1


class CUevent_flags(IntEnum):  # noqa: N801
    CU_EVENT_BLOCKING_SYNC = 1
    CU_EVENT_DISABLE_TIMING = 2


class CUmemLocation:
    type = id = None


class CUmemAllocationProp:
    type = location = requestedHandleTypes = None  # noqa: N815


class CUmemAccessDesc:
    location = flags = None


class CUmemcpyAttributes:
    srcAccessOrder = None  # noqa: N815


class CUuuid:
    def __init__(self, device):
        self.bytes = uuid.UUID(device.removeprefix("GPU-")).bytes


class CUdeviceptr(int):
    pass


class _Event:
    def __init__(self):
        self.copies = []


class _Stream:
    def __init__(self):
        self.waiting = []


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE
_context = threading.local()
_lock = threading.Lock()
_handles = {}  # numbers of allocations: descriptors
_numbers = itertools.count(1)
_mapped = {}  # device memory: size by address
_registered = {}  # host memory: size by address


def cuInit(flags):  # noqa: N802
    return (OK if DEVICES else CUresult.CUDA_ERROR_NO_DEVICE,)


def cuDeviceGetCount():  # noqa: N802
    return OK, len(DEVICES)


def cuDeviceGet(ordinal):  # noqa: N802
    return OK, ordinal


def cuDeviceGetUuid(dev):  # noqa: N802
    return OK, CUuuid(DEVICES[dev])


def cuDevicePrimaryCtxRetain(dev):  # noqa: N802
    return OK, f"context {dev}"


def cuCtxSetCurrent(ctx):  # noqa: N802
    _context.current = ctx
    return (OK,)


def cuStreamCreate(flags):  # noqa: N802
    return _in_context(_Stream())


def cuStreamDestroy(stream):  # noqa: N802
    with _lock:
        return (INVALID if stream.waiting else OK,)


def cuEventCreate(flags):  # noqa: N802
    return _in_context(_Event())


def cuEventDestroy(event):  # noqa: N802
    return (OK,)


def cuEventRecord(event, stream):  # noqa: N802
    with _lock:
        event.copies, stream.waiting = stream.waiting, []
    return (OK,)


def cuEventSynchronize(event):  # noqa: N802
    time.sleep(COPY_S)
    with _lock:
        for target, source, size in event.copies:
            ctypes.memmove(target, source, size)
        event.copies = []
    return (OK,)


def cuMemHostRegister(p, bytesize, flags):  # noqa: N802
    with _lock:
        if any(p < at + size and at < p + bytesize for at, size in _registered.items()):
            return (CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,)
        _registered[p] = bytesize
    return _in_context()


def cuMemHostUnregister(p):  # noqa: N802
    with _lock:
        return (OK if _registered.pop(p, 0) else INVALID,)


def cuMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrs_idxs, num_attrs, stream):  # noqa: N802
    assert len(dsts) == len(srcs) == len(sizes) == count > 0
    assert len(attrs) == len(attrs_idxs) == num_attrs == 1
    with _lock:
        for target, source, size in zip(dsts, srcs, sizes, strict=True):
            if not _is_known(target, size) or not _is_known(source, size):
                return (INVALID,)
            stream.waiting.append((target, source, size))
    return _in_context()


def cuMemGetAllocationGranularity(prop, option):  # noqa: N802
    return OK, GRANULARITY


def cuMemCreate(size, prop, flags):  # noqa: N802
    fd = os.memfd_create("gpu")
    os.ftruncate(fd, size)
    return _in_context(_handle(fd))


def cuMemExportToShareableHandle(handle, handle_type, flags):  # noqa: N802
    return OK, os.dup(_handles[handle])


def cuMemImportFromShareableHandle(os_handle, handle_type):  # noqa: N802
    return _in_context(_handle(os.dup(os_handle)))


def cuMemAddressReserve(size, alignment, addr, flags):  # noqa: N802
    return OK, CUdeviceptr(_mmap(None, size, mmap.PROT_READ, mmap.MAP_ANONYMOUS, -1))


def cuMemMap(ptr, size, offset, handle, flags):  # noqa: N802
    fd = _handles[handle]
    if os.fstat(fd).st_size < offset + size:
        return (INVALID,)
    _mmap(ptr, size, mmap.PROT_READ | mmap.PROT_WRITE, MAP_FIXED, fd)
    with _lock:
        _mapped[int(ptr)] = size
    return (OK,)


def cuMemSetAccess(ptr, size, desc, count):  # noqa: N802
    return (OK if len(desc) == count and int(ptr) in _mapped else INVALID,)


def cuMemUnmap(ptr, size):  # noqa: N802
    with _lock:
        return (OK if _mapped.pop(int(ptr), 0) == size else INVALID,)


def cuMemAddressFree(ptr, size):  # noqa: N802
    libc.munmap(int(ptr), size)
    return (OK,)


def cuMemRelease(handle):  # noqa: N802
    os.close(_handles.pop(handle))
    return (OK,)


def _mmap(address, size, protection, flags, fd):
    flags |= mmap.MAP_PRIVATE if fd < 0 else mmap.MAP_SHARED
    found = libc.mmap(address, size, protection, flags, fd, 0)
    assert found != MAP_FAILED, os.strerror(ctypes.get_errno())
    return found


def _handle(fd):
    number = next(_numbers)
    _handles[number] = fd
    return number


def _is_known(address, size):
    """Return whether memory is registered or mapped; pieces may span registered chunks."""
    for known in (_mapped, _registered):
        at = int(address)
        while True:
            found = next((s + n for s, n in known.items() if s <= at < s + n), None)
            if found is None:
                break
            if address + size <= found:
                return True
            at = found
    return False


def _in_context(*results):
    """Refuse a call unless this thread has a context."""
    if getattr(_context, "current", None) is None:
        return (CUresult.CUDA_ERROR_INVALID_CONTEXT, *results)
    return (OK, *results)
