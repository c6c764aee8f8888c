"""Progress of pending loads, in layers, as published in their progress words (D13).

A layer of a load is ready when all reads and verifications of the load have brought it: the slowest
operation counts. An operation may serve several loads, and a load may get new operations in place
of a failed one. Methods are called on the event loop, except record_progress(), which I/O threads
call.
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
    """A pending load.

    Attributes:
        word: index of its progress word; None if it has none.
        wait: tracing span from the grant until no operation of the load runs.
        began_s: time of the grant, on the monotonic clock.
        layers: operation → layers that it has brought, counted from the first.
        published: layers that are published in the word.
        num_running: operations of the load that have not ended.
    """

    word: int | None
    wait: Span
    began_s: float
    layers: dict[int, int] = field(default_factory=dict)
    published: int = 0
    num_running: int = 0


class LoadTracker:
    """The pending loads of one layout.

    Args:
        num_layers: layers of the layout; an operation that has succeeded has brought all of them.
        histograms: observe how long loads wait.

    Attributes:
        progress: progress words of the arena; None without an arena, when no load is tracked.
    """

    def __init__(self, num_layers: int, histograms: IoHistograms) -> None:
        self.progress: Progress | None = None
        self._num_layers = num_layers
        self._histograms = histograms
        self._lock = threading.Lock()
        self._running: dict[int, int] = {}  # operation → layers that it has brought
        self._loads: dict[int, _Load] = {}  # lease → load
        self._leases_of: dict[int, set[int]] = {}  # operation → leases of waiting loads

    def begin(self, op_id: int) -> None:
        """Record the begin of an operation that loads may wait for."""
        with self._lock:
            self._running[op_id] = 0

    def track(self, lease_id: int, op_ids: Iterable[int], wake: Callable[[], None]) -> None:
        """Publish the progress of a load from now on.

        A second call for the same load replaces its operations.

        Args:
            lease_id: lease of the load.
            op_ids: operations that the load waits for.
            wake: called after each change of the load's progress word.
        """
        with self._lock:
            load = self._loads.get(lease_id)
            if load is None:
                word = self._words().open(lease_id, wake)
                # The RPC that requests the load is being handled: its span is the current one.
                span = open_span("read", {"kvd.lease_id": lease_id})
                load = self._loads[lease_id] = _Load(word, span, time.monotonic())
            self._forget_operations(lease_id, load)
            # An operation that is not running has succeeded, or the load would not wait for it.
            load.layers = {op_id: self._running.get(op_id, self._num_layers) for op_id in op_ids}
            load.num_running = sum(op_id in self._running for op_id in load.layers)
            load.wait.set_attribute("kvd.blocks", len(load.layers))
            if not load.num_running:
                load.wait.end()
            for op_id in load.layers:
                self._leases_of.setdefault(op_id, set()).add(lease_id)
            self._publish(lease_id, load)

    def untrack(self, lease_id: int) -> None:
        """Forget a load that has ended."""
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

    def record_progress(self, op_id: int, num_layers: int) -> None:
        """Record that an operation has read and verified layers [0, num_layers)."""
        with self._lock:
            if op_id not in self._running:
                return
            self._running[op_id] = num_layers
            for lease_id in self._leases_of.get(op_id, ()):
                load = self._loads[lease_id]
                load.layers[op_id] = num_layers
                self._publish(lease_id, load)

    def record_end(self, op_id: int, *, is_good: bool) -> None:
        """Record the end of an operation; loads that wait for a failed one have failed."""
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
