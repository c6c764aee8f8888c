"""Copy streams: copies that run beside computing on a device, and marks that order the two.

On a CPU a copy is done when its call returns, and every mark is reached at once. On CUDA a call
only enqueues work. A CopyStream receives the work of one copy thread, so that it runs beside the
forward. A mark tells when copies are done, or when the data that they copy has been computed
(paper §3.2: load and save streams).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream's work; `torch.cuda.Event` is one."""

    def record(self, stream: Any) -> None:
        """Move the mark behind all work enqueued on a stream so far."""

    def query(self) -> bool:
        """Whether the work before the mark is done."""

    def synchronize(self) -> None:
        """Block until the work before the mark is done."""

    def wait(self, stream: Any) -> None:
        """Make work that is enqueued on a stream from now on wait for the mark."""


def _mark(module: Any, stream: Any) -> Mark:
    """Return a mark behind all work enqueued on a stream so far."""
    event: Mark = module.Event()
    event.record(stream)
    return event


def mark_enqueued(device: torch.device) -> Mark:
    """Return a mark behind all work enqueued on this thread's current stream."""
    module = torch.get_device_module(device)
    return _mark(module, module.current_stream(device))


def _stream_options(device: torch.device) -> dict[str, torch.device]:
    """Return the constructor arguments of a device's stream; torch.cpu.Stream takes none."""
    return {} if device.type == "cpu" else {"device": device}


class _Streams(threading.local):
    """The copy streams of the current thread, by module and device."""

    def __init__(self) -> None:
        self.streams: dict[Any, Any] = {}


class CopyStream:
    """The copy stream of one thread and device.

    All CopyStreams of a thread share one stream, because the device's caching allocator reuses
    freed memory only on the stream that it was allocated on.
    """

    _of_thread = _Streams()

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._computing = self._module.current_stream(device)
        streams = self._of_thread.streams
        key = (self._module, device)
        if key not in streams:
            streams[key] = self._module.Stream(**_stream_options(device))
        self._stream = streams[key]

    @contextmanager
    def copies(self, *, behind_computing: bool) -> Iterator[None]:
        """Enqueue the copies made inside the block on this stream, and wait for them at its end.

        Args:
            behind_computing: whether the copies first wait for all work that is being computed:
                it may still read their target memory, or write their source.
        """
        if behind_computing:
            self._stream.wait_stream(self._computing)
        with self._module.stream(self._stream):
            try:
                yield
            finally:
                # Also after an error: the caller releases memory that these copies may still use.
                self.mark().synchronize()

    def wait(self, mark: Mark) -> None:
        """Make the copies that follow wait for a mark in another stream's work."""
        mark.wait(self._stream)

    def mark(self) -> Mark:
        """Return a mark behind all copies enqueued so far."""
        return _mark(self._module, self._stream)


class CopyProgress:
    """Reports how many parts of a copy are done, in order, soon after each is."""

    def __init__(self, on_done: Callable[[int], None]) -> None:
        """Store the callback, which receives the number of parts that are done."""
        self._on_done = on_done
        self._marks: deque[Mark] = deque()
        self._num_done = 0

    def add(self, mark: Mark) -> None:
        """Add a part, which is enqueued up to a mark; wait for the part before it.

        So at most two parts are enqueued at a time, and each is reported soon after it is done.
        """
        self._marks.append(mark)
        if len(self._marks) > 1:
            self._marks[0].synchronize()
        while self._marks and self._marks[0].query():
            self._report_next()

    def finish(self) -> None:
        """Wait for all parts, and report each."""
        while self._marks:
            self._marks[0].synchronize()
            self._report_next()

    def _report_next(self) -> None:
        self._marks.popleft()
        self._num_done += 1
        self._on_done(self._num_done)
