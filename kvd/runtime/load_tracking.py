"""How far pending loads have come, in layers: what their progress words say (D13).

A load's layers are ready when all its reads and verifies have brought them: the least of these
operations counts. Operations may serve several loads, and a load may get new ones in the place of
one that failed. Called by the event loop, except advanced(), which I/O threads call.
"""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from kvd.runtime.completions import IoHistograms
from kvd.tiers.progress import Progress
from shared.serving.tracing import open_span


@dataclass
class _Load:
    """One load; `layers` by operation.

    Attributes:
        num_running: how many of its operations have not ended.
        wait: span from its grant until none of them runs.
    """

    word: int | None
    wait: Span
    began_s: float
    layers: dict[int, int] = field(default_factory=dict)
    published: int = 0
    num_running: int = 0


class LoadTracker:
    """The loads of one layout.

    Args:
        num_layers: of the layout: an operation that has ended well has brought them all.
        histograms: observe how long loads wait.

    Attributes:
        progress: the words of the layout's arena; None while it has none, and no load is tracked.
    """

    def __init__(self, num_layers: int, histograms: IoHistograms) -> None:
        self.progress: Progress | None = None
        self._num_layers = num_layers
        self._histograms = histograms
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # operation → layers it has brought
        self._loads: dict[int, _Load] = {}  # by lease
        self._leases_of: dict[int, set[int]] = {}  # by operation

    def begin(self, op_id: int) -> None:
        """Record that an operation has begun that loads may wait for."""
        with self._lock:
            self._running[op_id] = 0

    def track(self, lease_id: int, op_ids: Iterable[int], wake: Callable[[], None]) -> None:
        """Publish a load's layers; again for the same load: these operations count from now on."""
        with self._lock:
            load = self._loads.get(lease_id)
            if load is None:
                word = self._words().open(lease_id, wake)
                # Called within the RPC that asks for the load, whose span is the current one.
                span = open_span("read", {"kvd.lease_id": lease_id})
                load = self._loads[lease_id] = _Load(word, span, time.monotonic())
            self._forget_operations(lease_id, load)
            # One that is not running any more has ended well, or its load would not wait for it.
            load.layers = {op_id: self._running.get(op_id, self._num_layers) for op_id in op_ids}
            load.num_running = sum(op_id in self._running for op_id in load.layers)
            load.wait.set_attribute("kvd.blocks", len(load.layers))
            if not load.num_running:
                load.wait.end()
            for op_id in load.layers:
                self._leases_of.setdefault(op_id, set()).add(lease_id)
            self._publish(lease_id, load)

    def untrack(self, lease_id: int) -> None:
        """Forget a load that is over."""
        with self._lock:
            load = self._loads.pop(lease_id, None)
            if load is not None:
                self._forget_operations(lease_id, load)
                self._words().close(lease_id)
                if load.num_running:
                    load.wait.end()  # cancelled

    def index_of(self, lease_id: int) -> int | None:
        """Return the index of a load's progress word; None if it has none."""
        load = self._loads.get(lease_id)
        return None if load is None else load.word

    def advanced(self, op_id: int, num_layers: int) -> None:
        """Record that an operation has brought layers [0, num_layers), verified."""
        with self._lock:
            if op_id not in self._running:
                return
            self._running[op_id] = num_layers
            for lease_id in self._leases_of.get(op_id, ()):
                load = self._loads[lease_id]
                load.layers[op_id] = num_layers
                self._publish(lease_id, load)

    def ended(self, op_id: int, *, is_good: bool) -> None:
        """Note that an operation was reported; loads that count on one that failed have failed."""
        with self._lock:
            self._running.pop(op_id, None)
            leases = self._leases_of.pop(op_id, set())
            for lease_id in leases:
                if not is_good:
                    self._words().fail(lease_id)
                self._count_end(self._loads[lease_id])

    def _words(self) -> Progress:
        assert self.progress is not None, "loads are tracked where there is an arena"  # noqa: S101
        return self.progress

    def _count_end(self, load: _Load) -> None:
        load.num_running -= 1
        if not load.num_running:
            self._histograms.load_wait_s.observe(time.monotonic() - load.began_s)
            load.wait.end()

    def _publish(self, lease_id: int, load: _Load) -> None:
        ready = min(load.layers.values(), default=self._num_layers)
        if ready > load.published and load.word is not None:
            load.published = ready
            self._words().publish(lease_id, ready)

    def _forget_operations(self, lease_id: int, load: _Load) -> None:
        for op_id in load.layers:
            leases = self._leases_of.get(op_id, set())
            leases.discard(lease_id)
            if not leases:
                self._leases_of.pop(op_id, None)
