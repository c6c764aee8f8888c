"""DecodeGraphs: decode steps of some shapes, captured once, and replayed instead of computed anew.

A GPU computes a step of decode sooner than Python can enqueue it. What a captured step enqueues is
enqueued again in one call: the same kernels over the same memory, of which only the sheet of
numbers has changed (`decode_step.py`). How that is done is the device's business (`Capture`).

A step takes the smallest shape that it fits into. Shapes are few in both directions: every row is
computed, whether it has a sequence or not, and attention is divided for the longest sequence that
a shape reaches to.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.decode_step import DecodeStep, StepShape
from inference_svc.runtime.kv.layer_gate import StepClock

LEAST_REACH, REACH_FACTOR = 1024, 4  # the next reach is so many times as far
# Most rows times reach. What attention finds in its splits takes 64 MiB then, in a model of 32
# heads of 128; and who reads the KV of more tokens does not notice what enqueuing costs.
MOST_TOKENS = 1 << 20


class Capture(Protocol):
    """Captures what a call enqueues."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that are kept for all that was captured."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run once as ever, so that everything is compiled and allocated, and once captured.

        Returns:
            What enqueues the same again, over the same memory, on the caller's stream.

        Raises:
            whatever `run` or the device raises: it cannot be captured.
        """


def step_shapes(most_rows: int, window_tokens: int) -> list[StepShape]:
    """Choose the shapes for steps of at most so many sequences of so many tokens.

    Rows are 1, 2, 4, 8, 12, 16, 24, 32, ... and the most; the largest shapes come first.
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
    """See the module docstring; used by one thread at a time.

    Attributes:
        shapes: those that are captured, the largest first.
        num_bytes: of memory that the graphs keep.
    """

    def __init__(
        self, step: DecodeStep, capture: Capture, shapes: Sequence[StepShape], num_layers: int
    ) -> None:
        """Capture steps of these shapes, the largest first: others find room in their memory.

        Raises:
            whatever the model or the device raises: such steps cannot be captured.
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
        """Compute a step as `ModelRunner.step`, but move no counters.

        Returns:
            The logits; None: there is no graph for these chunks, and nothing was done.
        """
        shape = self.shape_of(chunks)
        return None if shape is None else self.replay(shape, chunks, clock)

    def replay(
        self, shape: StepShape, chunks: Sequence[Chunk], clock: StepClock | None = None
    ) -> Tensor:
        """Compute chunks that fit into this shape; return their logits."""
        self._step.fill(shape, chunks)
        self._replays[shape]()
        if clock is not None:
            clock.enqueued(self._num_layers)
        return self._step.logits(len(chunks))

    def shape_of(self, chunks: Sequence[Chunk]) -> StepShape | None:
        """Return the smallest shape that a step fits into; None: there is none."""
        rows = bisect_left(self._rows, len(chunks))
        reach = bisect_left(self._reaches, max(chunk.end_token for chunk in chunks))
        if rows == len(self._rows) or reach == len(self._reaches):
            return None
        shape = StepShape(self._rows[rows], self._reaches[reach])
        return shape if shape in self._replays and self._step.takes(chunks) else None
