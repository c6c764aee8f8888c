"""Driver: the calls of CUDA's driver that copies need.

The rest of the package knows the protocol only. Tests replace it by a simulated device, which runs
copies late and out of order (`tests/simulated_device.py`).
"""

import weakref
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.runtime.cuda.slot_copies import TokensInSlots, TokensOnDevice, copy_slots
from shared.cuda.driver_calls import DriverCalls
from shared.cuda.registered_memory import HostRegister
from shared.cuda.shared_memory import SharedGpuMemory


class Driver(HostRegister, Protocol):
    """Registers host memory, and copies between it and the device on a stream."""

    def gather(self, slots: TokensInSlots, here: TokensOnDevice) -> None:
        """Enqueue copies of tokens from registered memory to the device, on the current stream."""

    def scatter(self, here: TokensOnDevice, slots: TokensInSlots) -> None:
        """Enqueue copies of tokens from the device to registered memory, on the current stream."""

    def staging(self, num_bytes: int) -> Tensor:
        """Allocate pinned host memory, [num_bytes] uint8."""

    def share(self, num_bytes: int) -> tuple[Tensor, int]:
        """Allocate device memory that another process may map.

        Returns:
            [num_bytes] uint8, and its file descriptor, which the caller has to close.

        Raises:
            DriverError: the device has no room, or cannot share memory.
        """


class CudaDriver:
    """CUDA's driver, for one device.

    Attributes:
        uuid: the device's UUID, "GPU-…".
    """

    def __init__(self, device: torch.device) -> None:
        """Initialise the driver and the device's context.

        Raises:
            ImportError: the package `cuda-bindings` is not installed.
            DriverError: the driver is missing.
        """
        self._calls = DriverCalls()
        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._device = device
        self._number = torch.empty(0, device=device).get_device()
        self._context = self._calls.context(self._number)
        self.uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def register(self, address: int, num_bytes: int) -> None:
        """See Driver."""
        self._calls.enter(self._context)
        self._calls.register(address, num_bytes)

    def unregister(self, address: int) -> None:
        """See Driver."""
        self._calls.enter(self._context)
        torch.cuda.synchronize(self._device)
        self._calls.unregister(address)

    def gather(self, slots: TokensInSlots, here: TokensOnDevice) -> None:
        """See Driver."""
        copy_slots(slots, here, to_slots=False)

    def scatter(self, here: TokensOnDevice, slots: TokensInSlots) -> None:
        """See Driver."""
        copy_slots(slots, here, to_slots=True)

    def staging(self, num_bytes: int) -> Tensor:
        """See Driver."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def share(self, num_bytes: int) -> tuple[Tensor, int]:
        """See Driver."""
        self._calls.enter(self._context)
        memory = SharedGpuMemory(self._calls, self._number, num_bytes)
        fd, memory.fd = memory.fd, -1
        data = _Bytes(memory, num_bytes, self._device)
        return torch.as_tensor(data, device=self._device), fd


class _Bytes:
    """A buffer for `torch.as_tensor`; torch keeps this object as long as it uses the memory."""

    def __init__(self, memory: SharedGpuMemory, num_bytes: int, device: torch.device) -> None:
        weakref.finalize(self, _unmap, memory, device).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def _unmap(memory: SharedGpuMemory, device: torch.device) -> None:
    """Unmap memory, once no enqueued work uses it."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        memory.close()
