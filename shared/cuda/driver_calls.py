"""DriverCalls: CUDA's driver by the package `cuda-bindings`, with exceptions for statuses."""

from collections.abc import Sequence
from typing import Any


class DriverError(Exception):
    """A call of the driver failed, or there is no driver."""


class DriverCalls:
    """Calls functions of the driver.

    Attributes:
        names: the package's module, for its constants and structures.
    """

    def __init__(self) -> None:
        """Find the driver.

        Raises:
            ImportError: the package is not installed.
            DriverError: this machine has no driver, or it does not start.
        """
        from cuda.bindings import driver  # a machine without a GPU need not have it

        self.names: Any = driver
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # its library is not found
            raise DriverError("this machine has no CUDA driver") from error
        self._in_order = driver.CUmemcpyAttributes()
        order = driver.CUmemcpySrcAccessOrder
        self._in_order.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver and return its result: None, a value, or a tuple.

        Raises:
            DriverError: the function fails.
        """
        status, *results = getattr(self.names, name)(*arguments)
        if status != self.names.CUresult.CUDA_SUCCESS:
            raise DriverError(f"the CUDA call {name} failed: {status.name}")
        if len(results) > 1:
            return tuple(results)
        return results[0] if results else None

    def context(self, number: int) -> Any:
        """Return the primary context of a GPU, which the whole process shares, torch included."""
        return self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", number))

    def enter(self, context: Any) -> None:
        """Make a context current for this thread; a new thread has none."""
        self.call("cuCtxSetCurrent", context)

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory; see RegisteredMemory. A context must be current."""
        self.call("cuMemHostRegister", address, num_bytes, self.names.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self.call("cuMemHostUnregister", address)

    def copy_batch(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> None:
        """Enqueue copies between addresses on a stream; they may run in any order.

        Args:
            targets: addresses to copy to, at least one.
            sources: addresses to copy from.
            sizes: bytes of each copy.
            stream: the stream.
        """
        pointer = self.names.CUdeviceptr
        self.call(
            "cuMemcpyBatchAsync",
            [pointer(address) for address in targets],
            [pointer(address) for address in sources],
            list(sizes),
            len(sizes),
            [self._in_order],
            [0],
            1,
            stream,
        )
