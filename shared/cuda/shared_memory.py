"""Memory of a GPU that two processes have: one makes it, a descriptor takes it to the other (VMM).

Each has its own mapping, and the memory lives as long as one of them: neither the end of the one
nor that of the other leaves a mapping of nothing, as it does with handles of CUDA's older IPC.
"""

import os
from typing import Any

from shared.cuda.driver_calls import DriverCalls
from shared.types.units import align_up


class SharedGpuMemory:
    """A mapping of such memory in this process; the device's context is current.

    Attributes:
        address: of the device.
        num_bytes: its size; a multiple of the device's granularity.
        fd: the descriptor; -1 where it was imported. Whoever has sent it may close it.
    """

    def __init__(self, calls: DriverCalls, device: int, num_bytes: int, fd: int = -1) -> None:
        """Make memory, or import what another process has made.

        Args:
            calls: of the driver.
            device: its number.
            num_bytes: at least so many.
            fd: another process's descriptor, which stays the caller's; -1: make it.

        Raises:
            DriverError: the device has no room, or cannot share memory.
        """
        self._calls = calls
        names = calls.names
        properties = names.CUmemAllocationProp()
        properties.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(device)
        kind = names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties.requestedHandleTypes = kind
        least = names.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        granularity = calls.call("cuMemGetAllocationGranularity", properties, least)
        self.num_bytes = align_up(num_bytes, granularity)
        self.fd = -1
        if fd < 0:
            handle = calls.call("cuMemCreate", self.num_bytes, properties, 0)
        else:
            handle = calls.call("cuMemImportFromShareableHandle", fd, kind)
        try:
            self.address = self._map(handle, device)
            if fd < 0:
                self.fd = int(calls.call("cuMemExportToShareableHandle", handle, kind, 0))
        finally:
            calls.call("cuMemRelease", handle)  # the mapping, and a descriptor, keep the memory

    def close(self) -> None:
        """Undo the mapping; nothing copies from or to it any more."""
        self._calls.call("cuMemUnmap", self.address, self.num_bytes)
        self._calls.call("cuMemAddressFree", self.address, self.num_bytes)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self, handle: Any, device: int) -> int:
        address = self._calls.call("cuMemAddressReserve", self.num_bytes, 0, 0, 0)
        self._calls.call("cuMemMap", address, self.num_bytes, 0, handle, 0)
        access = self._calls.names.CUmemAccessDesc()
        access.location = self._location(device)
        flags = self._calls.names.CUmemAccess_flags
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._calls.call("cuMemSetAccess", address, self.num_bytes, [access], 1)
        return int(address)

    def _location(self, device: int) -> Any:
        location = self._calls.names.CUmemLocation()
        location.type = self._calls.names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location
