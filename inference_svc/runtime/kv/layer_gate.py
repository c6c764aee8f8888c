"""LayerGate: one thread opens it layer by layer, and other threads wait for layers.

A load opens a `LoadGate` as its copies arrive, and a forward passes it. A forward opens a
`StepClock` as it computes, and a save passes it. Both know the point in a stream's work at which a
layer's KV is complete. Owns a counter, an outcome and a condition; knows nothing of tensors.

Invariants:
1. layers open in order and stay open until the gate fails;
2. the first of `fail` and `confirm` settles the gate; later calls change nothing;
3. no thread passes a gate that has failed, even for layers that were open before: KV read through
   it may be garbage.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from inference_svc.runtime.kv.copy_stream import Mark, mark_enqueued
from shared.types.errors import LoadFailedError

LAYER_TIMEOUT_S = 60.0  # far beyond any layer's copy; kvd fails a slow read long before
_NONE_OPEN = -1  # open layers of a gate that failed: less than any layer's index + 1


# Waits for a layer, by its index; returns the number of layers that are there, this one included.
WaitLayer = Callable[[int], int]


def no_wait(_layer_index: int) -> int:
    """Return at once: every layer is there."""
    return sys.maxsize


class StepNotDoneError(Exception):
    """The step failed whose KV a save was following; the step is computed and saved again."""


class LayerGate:
    """A gate of a fixed number of layers; every method may be called from any thread.

    Attributes:
        on_change: called after each `open` and `fail`, in the thread that called these.
    """

    on_change: Callable[[], object] | None = None

    def __init__(self, num_layers: int) -> None:
        """Make a closed gate of `num_layers` layers."""
        self.num_layers = num_layers
        self._num_open = 0
        self._error: BaseException | None = None
        self._is_confirmed = False
        self._waited_s = 0.0
        self._changed = threading.Condition()

    @property
    def num_open(self) -> int:
        """Number of layers that may be passed; 0 once the gate has failed."""
        return max(self._num_open, 0)

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known: confirmed or failed."""
        return self._is_confirmed or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """The error with which the gate failed; None if it did not."""
        return self._error

    @property
    def waited_s(self) -> float:
        """Seconds that threads have spent blocked in `wait` and `wait_confirmed`, summed."""
        return self._waited_s

    def open(self, num_layers: int) -> None:
        """Open layers [0, num_layers); fewer than before changes nothing."""
        if num_layers > self.num_layers:
            raise AssertionError(f"{num_layers} layers opened of {self.num_layers}")
        with self._changed:
            if self._error is None and num_layers > self._num_open:
                self._num_open = num_layers
                self._changed.notify_all()
        self._notify()

    def on_copies_enqueued(self, num_layers: int, mark: Mark) -> None:
        """Record the mark behind the copies of layers [0, num_layers); ignored, see `LoadGate`."""

    def fail(self, error: BaseException) -> None:
        """Fail the gate: raise `error` in all threads that wait now or later."""
        with self._changed:
            if not self.is_settled:
                self._error = error
                self._num_open = _NONE_OPEN
                self._changed.notify_all()
        self._notify()

    def confirm(self) -> None:
        """Confirm the KV of all layers: only from now on may results that used it be sent."""
        with self._changed:
            if self._error is not None:
                return
            if self._num_open < self.num_layers:
                raise AssertionError(f"confirmed with {self._num_open} of {self.num_layers} layers")
            self._is_confirmed = True
            self._changed.notify_all()

    def wait(self, layer_index: int, timeout_s: float = LAYER_TIMEOUT_S) -> None:
        """Wait until a layer is open; an open one is passed without a lock.

        Raises:
            LoadFailedError: it did not open within `timeout_s`; the gate stays as it is.
            BaseException: the error with which the gate failed.
        """
        if not self._is_passable(layer_index + 1):
            self._block(f"layer {layer_index}", layer_index + 1, timeout_s)

    def wait_confirmed(self, timeout_s: float = LAYER_TIMEOUT_S) -> None:
        """Wait until the gate is confirmed; raises like `wait`."""
        if not self._is_confirmed:
            self._block("the confirmation", None, timeout_s)

    def _is_passable(self, num_layers: int) -> bool:
        """Whether layers [0, num_layers) may be passed."""
        return self._num_open >= num_layers

    def _notify(self) -> None:
        on_change = self.on_change
        if on_change is not None:
            on_change()

    def _block(self, awaited: str, num_layers: int | None, timeout_s: float) -> None:
        """Wait for `num_layers` open layers, or for the confirmation if it is None.

        Args:
            awaited: what the error message says was awaited.
            num_layers: number of layers, or None.
            timeout_s: seconds to wait at most.
        """

        def is_over() -> bool:
            is_there = self._is_confirmed if num_layers is None else self._is_passable(num_layers)
            return is_there or self._error is not None

        with self._changed:
            begin = time.monotonic()
            is_in_time = self._changed.wait_for(is_over, timeout_s)
            self._waited_s += time.monotonic() - begin
            if self._error is not None:
                raise self._error
        if not is_in_time:
            raise LoadFailedError(
                f"{awaited} of a load did not arrive within {timeout_s:g} s", "load again"
            )


class LoadGate(LayerGate):
    """The gate of a load: a layer may be passed as soon as its copies are enqueued.

    A thread that passes makes its current stream wait for the copies on the device. So neither
    thread waits for the other one or for the device.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._device = device
        self._module = torch.get_device_module(device)
        self._marks: list[Mark] = []  # by layer whose copies are enqueued
        self._stream_waits: list[tuple[Any, Any]] = []  # events before and behind each wait

    def on_copies_enqueued(self, num_layers: int, mark: Mark) -> None:
        """Open layers [0, num_layers) for streams that wait for the mark."""
        with self._changed:
            self._marks += [mark] * (num_layers - len(self._marks))
            self._changed.notify_all()

    def wait(self, layer_index: int, timeout_s: float = LAYER_TIMEOUT_S) -> None:
        """Wait until work that is enqueued from now on may read the layer; see LayerGate."""
        super().wait(layer_index, timeout_s)
        if layer_index < self.num_open or self._module is torch.cpu:
            return  # the copies are done; on a CPU enqueued ones always are
        stream = self._module.current_stream(self._device)
        before, behind = (self._module.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        self._marks[layer_index].wait(stream)
        behind.record(stream)
        self._stream_waits.append((before, behind))

    @property
    def waited_s(self) -> float:
        """Seconds that threads and streams have waited, summed; blocks until streams are done."""
        on_streams_s = 0.0
        for before, behind in self._stream_waits:
            behind.synchronize()
            on_streams_s += before.elapsed_time(behind) / 1e3
        return super().waited_s + on_streams_s

    def _is_passable(self, num_layers: int) -> bool:
        is_enqueued = self.error is None and len(self._marks) >= num_layers
        return is_enqueued or super()._is_passable(num_layers)


class StepClock(LayerGate):
    """The gate of a forward: a layer is open once the writes of its KV are enqueued.

    A save makes its copies of a layer wait for the mark that `computed_mark` returns.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._device = device
        self._marks: list[Mark] = []

    def on_enqueued(self, num_layers: int) -> None:
        """Open layers [0, num_layers): all writes of their KV are enqueued on this stream."""
        mark = mark_enqueued(self._device)
        self._marks += [mark] * (num_layers - len(self._marks))
        self.open(num_layers)

    def computed_mark(self, layer_index: int) -> Mark:
        """Return the mark at which the KV of an open layer is written."""
        return self._marks[layer_index]
