"""What copies need of CUDA's driver, and the driver itself.

The protocol is what the rest of the package knows: tests put a simulated device in its place, which
runs copies late and out of order (`tests/simulated_device.py`).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class DriverError(Exception):
    """A call of the driver failed."""


class Driver(Protocol):
    """Registers host memory, and copies between it and the device on a stream."""

    def register(self, address: int, num_bytes: int) -> None:
        """Lock host memory in place, so that the device reads and writes it directly.

        Raises:
            DriverError: it cannot be.
        """

    def unregister(self, address: int) -> None:
        """Undo `register` of memory that begins at this address; blocks until copies are done."""

    def copy_batch(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Enqueue copies of so many bytes on this thread's current stream, in any order.

        Args:
            targets: addresses, of the device or of registered memory.
            sources: likewise.
            sizes: bytes of each; at least one.

        Raises:
            DriverError: they cannot be.
        """

    def staging(self, num_bytes: int) -> Tensor:
        """Return [num_bytes] uint8 of host memory that is locked in place."""


class CudaDriver:
    """CUDA's driver, by the package `cuda-bindings`; for one device."""

    def __init__(self, device: torch.device) -> None:
        """Make sure that the device has a context.

        Raises:
            ImportError: the package is not installed.
        """
        from cuda.bindings import driver  # a CPU's host has none

        torch.cuda.init()  # type: ignore[no-untyped-call]
        self._driver: Any = driver
        self._device = device
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes = [attributes]

    def register(self, address: int, num_bytes: int) -> None:
        """See Driver."""
        with torch.cuda.device(self._device):
            portable = self._driver.CU_MEMHOSTREGISTER_PORTABLE
            self._check(self._driver.cuMemHostRegister(address, num_bytes, portable))

    def unregister(self, address: int) -> None:
        """See Driver."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            self._check(self._driver.cuMemHostUnregister(address))

    def copy_batch(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """See Driver."""
        pointer = self._driver.CUdeviceptr
        self._check(
            self._driver.cuMemcpyBatchAsync(
                [pointer(address) for address in targets],
                [pointer(address) for address in sources],
                list(sizes),
                len(sizes),
                self._attributes,
                [0],
                1,
                torch.cuda.current_stream(self._device).cuda_stream,
            )
        )

    def staging(self, num_bytes: int) -> Tensor:
        """See Driver."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _check(self, result: tuple[Any, ...]) -> None:
        status = result[0]
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(str(status.name))
