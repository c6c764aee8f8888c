"""The GPU of a copier: its context, streams and memory, through calls of the CUDA driver."""

import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from shared.cuda.driver_calls import DriverCalls, DriverError
from shared.cuda.shared_memory import SharedGpuMemory


class Ring(Protocol):
    """An engine's ring: its memory on the GPU, mapped into this process."""

    @property
    def address(self) -> int:
        """Device address of the ring."""

    def close(self) -> None:
        """Unmap the ring; no copy may use it any more."""


class Gpu(Protocol):
    """The operations of a GPU that channels need. Any thread may call any method."""

    def register(self, address: int, num_bytes: int) -> None:
        """See `HostRegister`."""

    def unregister(self, address: int) -> None:
        """See `HostRegister`."""

    def ring(self, fd: int, num_bytes: int) -> Ring:
        """Map a ring that an engine shares.

        Raises:
            DriverError: the ring cannot be mapped.
        """

    def stream(self) -> Any:
        """Create a stream."""

    def end_stream(self, stream: Any) -> None:
        """Destroy a stream whose copies are done."""

    def copy(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> Any:
        """Enqueue copies between addresses; return their handle for wait()."""

    def wait(self, copied: Any) -> None:
        """Block until the copies of a handle are done; the handle is used up."""


class CudaGpu:
    """A GPU of this machine; see Gpu."""

    def __init__(self, device: str) -> None:
        """Find a GPU by its UUID, "GPU-…".

        Raises:
            ImportError: the package `cuda-bindings` is not installed.
            DriverError: there is no driver, or no such GPU.
        """
        self._calls = DriverCalls()
        self._number = self._find(device)
        self._context = self._calls.context(self._number)

    def register(self, address: int, num_bytes: int) -> None:
        """See HostRegister."""
        self._enter()
        self._calls.register(address, num_bytes)

    def unregister(self, address: int) -> None:
        """See HostRegister."""
        self._enter()
        self._calls.unregister(address)

    def ring(self, fd: int, num_bytes: int) -> SharedGpuMemory:
        """See Gpu."""
        self._enter()
        return SharedGpuMemory(self._calls, self._number, num_bytes, fd)

    def stream(self) -> Any:
        """See Gpu."""
        self._enter()
        flags = self._calls.names.CUstream_flags
        return self._calls.call("cuStreamCreate", flags.CU_STREAM_NON_BLOCKING)

    def end_stream(self, stream: Any) -> None:
        """See Gpu."""
        self._enter()
        self._calls.call("cuStreamDestroy", stream)

    def copy(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: Any
    ) -> Any:
        """See Gpu."""
        self._enter()
        self._calls.copy_batch(targets, sources, sizes, stream)
        flags = self._calls.names.CUevent_flags
        # Blocking sync: waiting threads sleep. Spinning ones would take a core from the engines.
        kind = flags.CU_EVENT_BLOCKING_SYNC | flags.CU_EVENT_DISABLE_TIMING
        event = self._calls.call("cuEventCreate", kind)
        self._calls.call("cuEventRecord", event, stream)
        return event

    def wait(self, copied: Any) -> None:
        """See Gpu."""
        self._enter()
        self._calls.call("cuEventSynchronize", copied)
        self._calls.call("cuEventDestroy", copied)

    def _enter(self) -> None:
        self._calls.enter(self._context)

    def _find(self, device: str) -> int:
        for number in range(self._calls.call("cuDeviceGetCount")):
            handle = self._calls.call("cuDeviceGet", number)
            found = uuid.UUID(bytes=bytes(self._calls.call("cuDeviceGetUuid", handle).bytes))
            if device == f"GPU-{found}":
                return number
        raise DriverError(f"the GPU {device} is not visible to this process")
