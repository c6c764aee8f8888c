"""Copies beside computing: streams of their own on a device that has streams, and their order.

On a CPU a copy is done when its call returns, and every mark is reached. On CUDA calls only enqueue
work: a CopyStream takes that of one copy thread, so that it runs beside what is computed, and marks
say when it is done, or when what it copies has been computed (paper §3.2: load and save streams).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None:
        """Move it to the end of what was enqueued on a stream so far."""

    def query(self) -> bool:
        """Whether the work before it is done."""

    def synchronize(self) -> None:
        """Wait until it is."""

    def wait(self, stream: Any) -> None:
        """Have what is enqueued on a stream from now on wait for it."""


def _mark(module: Any, stream: Any) -> Mark:
    """Mark the end of what was enqueued on a stream so far."""
    event: Mark = module.Event()
    event.record(stream)
    return event


def mark_enqueued(device: torch.device) -> Mark:
    """Mark the end of what was enqueued on this thread's current stream."""
    module = torch.get_device_module(device)
    return _mark(module, module.current_stream(device))


def _stream_options(device: torch.device) -> dict[str, torch.device]:
    """Return the arguments of a stream on a device; a CPU's takes none."""
    return {} if device.type == "cpu" else {"device": device}


class _Streams(threading.local):
    """The streams of each thread, by module and device; each thread sees its own."""

    def __init__(self) -> None:
        self.streams: dict[Any, Any] = {}


class CopyStream:
    """The stream of one piece of copying; used by one thread, whose pieces all have the same.

    So that the device's allocator finds for one what it had for another.
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
        """Copies that are made inside are this stream's; all are done when the block is left.

        Args:
            behind_computing: whether they wait for all that is being computed: what lends its
                memory to them may still be read, or what they copy be written.
        """
        if behind_computing:
            self._stream.wait_stream(self._computing)
        with self._module.stream(self._stream):
            try:
                yield
            finally:  # whatever has happened: memory is given away after this
                self.mark().synchronize()

    def wait(self, mark: Mark) -> None:
        """Have the copies that follow wait for a point in another stream's work."""
        mark.wait(self._stream)

    def mark(self) -> Mark:
        """Mark the end of what was copied so far."""
        return _mark(self._module, self._stream)


class DoneInOrder:
    """Calls back for each part of some work, in order, soon after the part is done."""

    def __init__(self, done: Callable[[int], None]) -> None:
        """Store what is called with the number of parts that are done."""
        self._done = done
        self._marks: deque[Mark] = deque()
        self._num_done = 0

    def enqueued(self, mark: Mark) -> None:
        """Another part has been enqueued; the one before it is waited for, so that two are."""
        self._marks.append(mark)
        if len(self._marks) > 1:
            self._marks[0].synchronize()
        while self._marks and self._marks[0].query():
            self._next()

    def finish(self) -> None:
        """Wait for all parts."""
        while self._marks:
            self._marks[0].synchronize()
            self._next()

    def _next(self) -> None:
        self._marks.popleft()
        self._num_done += 1
        self._done(self._num_done)
