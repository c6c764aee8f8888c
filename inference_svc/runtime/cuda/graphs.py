"""CUDA graphs: captures the work that a call enqueues, to enqueue it again in one call."""

from collections.abc import Callable
from contextlib import suppress

import torch


class CudaCapture:
    """Captures on a stream of its own; all graphs take their memory from one pool.

    Graphs may share memory because they are replayed one at a time, and because no result that a
    graph leaves in the pool is read after another graph has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free_before = self._free_bytes()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once to compile and allocate, and once captured; see the protocol `Capture`."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            run()
            self._stream.synchronize()
            # Copy threads go on meanwhile: in the global mode their calls would fail the capture.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # it reports the failed capture again
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that graphs have taken, the driver's own included."""
        return max(0, self._free_before - self._free_bytes())

    def _free_bytes(self) -> int:
        """Return the free bytes of the device, after torch has released its cached memory."""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes


def capture_on(device: torch.device) -> CudaCapture | None:
    """Return the capture of a device; None: the device has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None
