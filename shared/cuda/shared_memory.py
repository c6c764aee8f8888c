"""SharedGpuMemory: memory of a GPU that two processes map, passed on by a descriptor (CUDA's VMM).

Each process has its own mapping, and the memory lives as long as any mapping. With the handles of
CUDA's older IPC the importer's mapping would become invalid when the exporter ends.
"""

import os
from typing import Any

from shared.cuda.driver_calls import DriverCalls
from shared.types.units import align_up


class SharedGpuMemory:
    """This process's mapping of shared GPU memory. The device's context has to be current.

    Attributes:
        address: address on the device.
        num_bytes: its size, a multiple of the device's granularity.
        fd: its descriptor, which may be closed once it is sent; -1: the memory was imported.
    """

    def __init__(self, calls: DriverCalls, device: int, num_bytes: int, fd: int = -1) -> None:
        """Allocate memory, or import that of another process.

        Args:
            calls: the driver.
            device: number of the GPU.
            num_bytes: least size.
            fd: descriptor of another process's memory, which the caller keeps; -1: allocate.

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
            calls.call("cuMemRelease", handle)  # mapping and descriptor keep the memory alive

    def close(self) -> None:
        """Unmap the memory; no copies from or to it may be under way."""
        self._calls.call("cuMemUnmap", self.address, self.num_bytes)
        self._calls.call("cuMemAddressFree", self.address, self.num_bytes)
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _map(self, handle: Any, device: int) -> int:
        """Reserve an address range and map the memory there, readable and writable."""
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
