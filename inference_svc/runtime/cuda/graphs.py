"""CUDA graphs: what a call enqueues, kept by the driver, and enqueued again in one call."""

from collections.abc import Callable
from contextlib import suppress

import torch


class CudaCapture:
    """Captures on a stream of its own; all graphs have their memory from one pool.

    They may, since they are replayed one at a time, and nothing that one leaves in the pool is read
    after another has run.
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
            # Other threads go on with what a capture of the whole process would refuse.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):  # which says that the capture has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    @property
    def num_bytes(self) -> int:
        """Bytes of the device's memory that capturing has taken, the driver's included."""
        return max(0, self._free_before - self._free_bytes())

    def _free_bytes(self) -> int:
        """Return what is free on the device, without what torch keeps for later."""
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return free_bytes


def capture_on(device: torch.device) -> CudaCapture | None:
    """Return what captures on a device; None: it has no graphs."""
    return CudaCapture(device) if device.type == "cuda" else None
