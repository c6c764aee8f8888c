"""LayerGate: what one thread opens layer by layer, and others wait for.

A load opens the gate as its copies arrive, a forward passes it (`LoadGate`); a forward opens the
gate as it computes, a save passes it (`StepClock`): each knows where what it opens for ends in a
stream's work. Owns a counter, an outcome and a condition; knows nothing of tensors.

Invariants:
1. layers open in order and stay open until the gate fails;
2. the first of `fail` and `confirm` settles the gate, what comes later changes nothing;
3. nobody passes a gate that failed, whatever was open before: KV read through it may be garbage.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from inference_svc.runtime.kv.copy_stream import Mark, mark_enqueued
from shared.types.errors import LoadFailedError

LAYER_TIMEOUT_S = 60.0  # far beyond any layer's copy; kvd has given up a slow read long before
_NONE_OPEN = -1  # layers open in a gate that failed: less than any layer's index + 1


# Waits for a layer; returns how many are there, this one among them.
WaitLayer = Callable[[int], int]


def no_wait(_layer_index: int) -> int:
    """Every layer is there."""
    return sys.maxsize


class StepNotDoneError(Exception):
    """A step failed whose KV a save was following; it is computed and saved anew."""


class LayerGate:
    """See the module docstring; every method may be called from any thread.

    Attributes:
        on_change: callback after each layer that opens, and after a failure, in that thread.
    """

    on_change: Callable[[], None] | None = None

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
        """Layers that may be passed; 0 once the gate failed."""
        return max(self._num_open, 0)

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is known: confirmed or failed."""
        return self._is_confirmed or self._error is not None

    @property
    def error(self) -> BaseException | None:
        """Why the gate failed; None if it did not."""
        return self._error

    @property
    def waited_s(self) -> float:
        """Seconds that threads spent blocked in `wait` and `wait_confirmed`, summed."""
        return self._waited_s

    def open(self, num_layers: int) -> None:
        """Let layers [0, num_layers) be passed; fewer than before changes nothing."""
        if num_layers > self.num_layers:
            raise AssertionError(f"{num_layers} layers opened of {self.num_layers}")
        with self._changed:
            if self._error is None and num_layers > self._num_open:
                self._num_open = num_layers
                self._changed.notify_all()
        self._notify()

    def copies_enqueued(self, num_layers: int, mark: Mark) -> None:
        """Note where on a device the copies of layers [0, num_layers) end; nobody passes sooner."""

    def fail(self, error: BaseException) -> None:
        """Raise `error` in all who wait, and in everybody who waits later."""
        with self._changed:
            if not self.is_settled:
                self._error = error
                self._num_open = _NONE_OPEN
                self._changed.notify_all()
        self._notify()

    def confirm(self) -> None:
        """Confirm the KV of all layers: only now may results that used it leave the engine."""
        with self._changed:
            if self._error is not None:
                return
            if self._num_open < self.num_layers:
                raise AssertionError(f"confirmed with {self._num_open} of {self.num_layers} layers")
            self._is_confirmed = True
            self._changed.notify_all()

    def wait(self, layer_index: int, timeout_s: float = LAYER_TIMEOUT_S) -> None:
        """Return once the layer is open; at once, and without a lock, if it is.

        Raises:
            LoadFailedError: it did not open within `timeout_s`; the gate stays as it is.
            whatever `fail` was given.
        """
        if not self._lets_pass(layer_index + 1):
            self._block(f"layer {layer_index}", layer_index + 1, timeout_s)

    def wait_confirmed(self, timeout_s: float = LAYER_TIMEOUT_S) -> None:
        """Return once the gate is confirmed; raises as `wait` does."""
        if not self._is_confirmed:
            self._block("the confirmation", None, timeout_s)

    def _lets_pass(self, num_layers: int) -> bool:
        """Whether layers [0, num_layers) may be passed."""
        return self._num_open >= num_layers

    def _notify(self) -> None:
        on_change = self.on_change
        if on_change is not None:
            on_change()

    def _block(self, awaited: str, num_layers: int | None, timeout_s: float) -> None:
        """Wait for `num_layers` open layers, or for the confirmation if it is None."""

        def is_over() -> bool:
            is_there = self._is_confirmed if num_layers is None else self._lets_pass(num_layers)
            return is_there or self._error is not None

        with self._changed:
            begin = time.monotonic()
            is_in_time = self._changed.wait_for(is_over, timeout_s)
            self._waited_s += time.monotonic() - begin
            if self._error is not None:
                raise self._error
        if not is_in_time:
            raise LoadFailedError(
                f"{awaited} of a load did not arrive within {timeout_s:g} s", "ask again"
            )


class LoadGate(LayerGate):
    """The gate of a load: a layer may be passed as soon as its copies are enqueued.

    What follows on the stream of who passes waits for them there: neither thread waits for the
    other, nor for the device.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._device = device
        self._module = torch.get_device_module(device)
        self._marks: list[Mark] = []  # of layers whose copies are enqueued
        self._passed: list[tuple[Any, Any]] = []  # before and behind each wait of a stream

    def copies_enqueued(self, num_layers: int, mark: Mark) -> None:
        """Let layers [0, num_layers) be passed by what waits for the mark."""
        with self._changed:
            self._marks += [mark] * (num_layers - len(self._marks))
            self._changed.notify_all()

    def wait(self, layer_index: int, timeout_s: float = LAYER_TIMEOUT_S) -> None:
        """Return once what is enqueued from now on may read the layer; see LayerGate."""
        super().wait(layer_index, timeout_s)
        if layer_index < self.num_open or self._module is torch.cpu:
            return  # a CPU has copied when it has enqueued
        stream = self._module.current_stream(self._device)
        before, behind = (self._module.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        self._marks[layer_index].wait(stream)
        behind.record(stream)
        self._passed.append((before, behind))

    @property
    def waited_s(self) -> float:
        """Seconds that threads and streams have waited, summed; blocks until streams have."""
        on_streams_s = 0.0
        for before, behind in self._passed:
            behind.synchronize()
            on_streams_s += before.elapsed_time(behind) / 1e3
        return super().waited_s + on_streams_s

    def _lets_pass(self, num_layers: int) -> bool:
        is_enqueued = self.error is None and len(self._marks) >= num_layers
        return is_enqueued or super()._lets_pass(num_layers)


class StepClock(LayerGate):
    """The gate of a forward: a layer is open once its KV is written, or will have been.

    Whoever copies them has its copies wait for `computed`.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._device = device
        self._marks: list[Mark] = []

    def enqueued(self, num_layers: int) -> None:
        """The KV of layers [0, num_layers) is written by what was enqueued so far."""
        mark = mark_enqueued(self._device)
        self._marks += [mark] * (num_layers - len(self._marks))
        self.open(num_layers)

    def computed(self, layer_index: int) -> Mark:
        """When the KV of an open layer is written."""
        return self._marks[layer_index]
