"""How fast the device's memory is read: what a decode step cannot beat."""

import time
from collections.abc import Callable

import torch

ROW_ITEMS = 4096
BUFFER_BYTES = 512 << 20  # far more than any cache
CUDA_BUFFER_BYTES = 4 << 30
TRIES = 3


class MemoryReader:
    """Reads a buffer over and over, in the way that turns out the fastest; float32.

    Args:
        num_bytes: of the buffer; 0: far more than any cache.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self._device = device
        num_bytes = num_bytes or (CUDA_BUFFER_BYTES if device.type == "cuda" else BUFFER_BYTES)
        self._buffer = torch.ones(num_bytes // 4 // ROW_ITEMS, ROW_ITEMS, device=device)
        self._vector = torch.ones(ROW_ITEMS, device=device)
        ways: list[Callable[[], torch.Tensor]] = [
            self._buffer.sum,
            lambda: torch.mv(self._buffer, self._vector),
        ]
        self._read = max(ways, key=lambda way: max(self._speed(way) for _ in range(TRIES)))

    def bytes_per_s(self) -> float:
        """Measure it now, the best of some tries."""
        return max(self._speed(self._read) for _ in range(TRIES))

    def _speed(self, read: Callable[[], torch.Tensor]) -> float:
        self._wait()
        started_s = time.perf_counter()
        read()
        self._wait()
        return self._buffer.nbytes / (time.perf_counter() - started_s)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
