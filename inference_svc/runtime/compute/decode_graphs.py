"""DecodeGraphs: decode steps of some shapes, captured once and replayed as CUDA graphs.

A GPU computes a decode step sooner than Python can enqueue it. A captured step is enqueued again in
one call: the same kernels over the same memory, in which only the step's input sheet has changed
(`decode_step.py`). How a device captures is up to its `Capture`.

A step uses the smallest shape that it fits into. Shapes are few in both directions, because every
row is computed, whether it has a sequence or not, and attention is divided for the longest sequence
that a shape allows (its reach).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_step import DecodeStep, StepShape
from inference_svc.runtime.kv.layer_gate import StepClock

LEAST_REACH, REACH_FACTOR = 1024, 4  # the smallest reach, and the ratio of one reach to the next
# Upper bound of rows times reach. The partial results of attention's splits then take 64 MiB, in a
# model of 32 heads of 128. A step over more tokens takes so long that enqueuing it does not matter.
MOST_TOKENS = 1 << 20


class Capture(Protocol):
    """Captures the work that a call enqueues on a device."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that all captured work keeps."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once normally, so that everything is compiled and allocated, and once captured.

        Returns:
            A function that enqueues the same work again, over the same memory, on the caller's
            stream.

        Raises:
            Exception: from `run` or the device; the work cannot be captured.
        """


def step_shapes(most_rows: int, window_tokens: int) -> list[StepShape]:
    """Choose the shapes to capture, the largest first.

    Args:
        most_rows: most sequences of a step.
        window_tokens: most tokens of a sequence.

    Returns:
        Shapes of 1, 2, 4, 8, 12, 16, 24, 32, ... and `most_rows` rows.
    """
    rows = {1, 2, 4} | {size << shift for size in (8, 12) for shift in range(8)}
    reaches = [LEAST_REACH]
    while reaches[-1] < window_tokens:
        reaches.append(reaches[-1] * REACH_FACTOR)
    shapes = {
        StepShape(min(size, most_rows), min(reach, window_tokens))
        for size in rows
        for reach in reaches
        if min(size, most_rows) * min(reach, window_tokens) <= MOST_TOKENS
    }
    return sorted(shapes, reverse=True)


class DecodeGraphs:
    """The captured decode steps of one model; used by one thread at a time.

    Attributes:
        shapes: the captured shapes, the largest first.
        num_bytes: bytes of memory that the graphs keep.
    """

    def __init__(
        self, step: DecodeStep, capture: Capture, shapes: Sequence[StepShape], num_layers: int
    ) -> None:
        """Capture steps of these shapes.

        Args:
            step: the step, whose tensors stay in place.
            capture: captures on the device.
            shapes: the largest first, so that smaller graphs reuse the memory of larger ones.
            num_layers: number of the model's layers.

        Raises:
            Exception: from the model or the device; such steps cannot be captured.
        """
        self.shapes = shapes
        self._step = step
        self._num_layers = num_layers
        self._replays: dict[StepShape, Callable[[], None]] = {}
        for shape in shapes:
            step.fill(shape, ())
            self._replays[shape] = capture(partial(step.run, shape))
        self.num_bytes = capture.num_bytes
        self._rows, self._reaches = (sorted(set(sizes)) for sizes in zip(*shapes, strict=True))

    def step(self, chunks: Sequence[Chunk], clock: StepClock | None) -> Tensor | None:
        """Compute a step like `ModelRunner.step`, but move no counters.

        Returns:
            [chunks, vocab] logits on the host; None: no graph fits these chunks, and nothing was
            done.
        """
        shape = self.shape_of(chunks)
        return None if shape is None else self.replay(shape, chunks, clock)

    def replay(
        self, shape: StepShape, chunks: Sequence[Chunk], clock: StepClock | None = None
    ) -> Tensor:
        """Compute chunks that fit into this shape; return [chunks, vocab] logits on the host."""
        self._step.fill(shape, chunks)
        self._replays[shape]()
        if clock is not None:
            clock.on_enqueued(self._num_layers)
        return self._step.logits(len(chunks))

    def shape_of(self, chunks: Sequence[Chunk]) -> StepShape | None:
        """Return the smallest captured shape that a step fits into; None: there is none."""
        rows = bisect_left(self._rows, len(chunks))
        reach = bisect_left(self._reaches, max(chunk.end_token for chunk in chunks))
        if rows == len(self._rows) or reach == len(self._reaches):
            return None
        shape = StepShape(self._rows[rows], self._reaches[reach])
        return shape if shape in self._replays and self._step.can_run(chunks) else None
