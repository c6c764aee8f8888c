"""Decode steps that are captured once and replayed: one new token for each of several sequences.

A GPU computes a decode step sooner than Python can enqueue it. A captured step is enqueued again in
one call: the same kernels over the same memory. So a `DecodeStep` computes from tensors that never
move. All inputs that differ from step to step are on one sheet of int32 numbers, a row per
sequence:

    tokens | lengths | write slots | slots | pages of row 0 | pages of row 1 | ...

Slots and pages are given for each group of layers (`layer_groups.py`), usually one: the pages of
all rows for one group, then those for the next.

`fill` copies the sheet to the device in one copy. `run` computes it and reads no other input that
changes, so the work that it enqueues can be enqueued again unchanged. A row without a sequence
computes a lone token on spare memory, which no sequence uses.

`DecodeGraphs` has a graph for each of some shapes; how a device captures is up to its `Capture`. A
step uses the smallest shape that it fits into. Shapes are few in both directions, because every row
is computed, whether it has a sequence or not, and attention is divided for the longest sequence
that a shape allows (its reach).

Invariant: `fill` is called only after the logits of the previous step were read: until then its
copy to the device may still read the staging memory.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_svc.runtime.attention.paged_attention import PagedAttention, PageStep
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import DecodeForward
from inference_svc.runtime.compute.step_places import BufferedTokens, NewOnPages, StepPlaces
from inference_svc.runtime.kv.layer_gate import StepClock
from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.memory import copy_to_host
from inference_svc.runtime.model.capture import ForwardCall
from inference_svc.runtime.model.forward import forward_context
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.units import ceil_div

LEAST_REACH, REACH_FACTOR = 1024, 4  # the smallest reach, and the ratio of one reach to the next
# Upper bound of rows times reach. The partial results of attention's splits then take 64 MiB, in a
# model of 32 heads of 128. A step over more tokens takes so long that enqueuing it does not matter.
MOST_TOKENS = 1 << 20


class StepShape(NamedTuple):
    """The size of a step: it decides which kernels run, and over which memory.

    Attributes:
        rows: most sequences.
        reach: most tokens of each sequence, the new one included.
    """

    rows: int
    reach: int


class _Sheet(NamedTuple):
    """The inputs of a step on the device; all int32.

    Attributes:
        tokens: [rows] ids of the new tokens.
        lengths: [rows] lengths of the sequences, in tokens, the new token included.
        write_slots: [rows] slots of the new tokens in the write ring.
        slots: [groups, rows] slots of the new tokens in working KV.
        tables: by group [rows, pages]: each sequence's pages, and garbage behind its last one.
    """

    tokens: Tensor
    lengths: Tensor
    write_slots: Tensor
    slots: Tensor
    tables: list[Tensor]


PLAIN_COLUMNS = 3  # before the slots of each group


class _Staged(NamedTuple):
    """The sheet of one shape on the host, where `fill` writes it, and its copy on the device.

    `fill` writes through numpy views: a call of torch takes longer than writing a row of numbers.

    Attributes:
        columns: [columns, rows] int32: the sheet without its tables.
        tables: by group [rows, pages] int32.
        source: [items] int32: the same host memory as one tensor.
        target: [items] int32 on the device.
    """

    columns: npt.NDArray[np.int32]
    tables: list[npt.NDArray[np.int32]]
    source: Tensor
    target: Tensor


class DecodeStep:
    """The decode step of one model; used by one thread at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration,
        attention: PagedAttention,
        memory: tuple[PagePool, WriteRing],
        shapes: Sequence[StepShape],
    ) -> None:
        """Allocate the tensors that stay in place, for steps of these shapes over this memory."""
        self._call = ForwardCall(loaded.model)
        self._calibration = calibration
        self._attention = attention
        pool, ring = memory
        self._spare_kv, self._spare_buffer = pool.spare_kv(), ring.spare_buffer()
        self._has_buffers = ring.num_slots > 0
        self._page_tokens = pool.groups.tokens_on_page
        self._num_columns = PLAIN_COLUMNS + len(self._page_tokens)
        self._device = loaded.device
        num_items = max(sum(self._sizes(shape)) for shape in shapes)
        self._numbers = torch.zeros(num_items, dtype=torch.int32, device=loaded.device)
        staged = torch.zeros(num_items, dtype=torch.int32, pin_memory=loaded.device.type == "cuda")
        self._staged = {shape: self._staged_sheet(staged, shape) for shape in shapes}
        spare_slots = [table.slot_of(0) for table in self._spare_kv.tables.by_group]
        idle = [0, 1, self._spare_buffer.slots[0], *spare_slots]
        self._idle_column = np.array(idle, np.int32)[:, None]
        self._most_rows = max(shape.rows for shape in shapes)
        self._logits: Tensor | None = None
        self._pages = {shape: self._page_steps(shape) for shape in shapes}

    def can_run(self, chunks: Sequence[Chunk]) -> bool:
        """Whether every chunk is one token of a sequence in this memory.

        Chunks with scores, pooling, states or a load under way are not supported.
        """
        return all(
            len(chunk.token_ids) == chunk.num_logits == 1
            and chunk.scores is None
            and chunk.pooler is None
            and chunk.kv.gate is None
            and chunk.kv.states is None
            and isinstance(chunk.kv, PagedKv)
            and chunk.kv.keys.slots is self._spare_kv.keys.slots
            and self._supports_buffer(chunk.write_buffer)
            for chunk in chunks
        )

    @torch.inference_mode()
    def fill(self, shape: StepShape, chunks: Sequence[Chunk]) -> None:
        """Write these chunks to the first rows, and the spare memory to the remaining ones.

        Args:
            shape: a shape that the chunks fit into.
            chunks: chunks for which `can_run` is true.
        """
        staged, num_rows, filled = self._staged[shape], len(chunks), []
        for row, chunk in enumerate(chunks):
            assert isinstance(chunk.kv, PagedKv)  # noqa: S101 - `can_run` has checked it
            end_token = chunk.end_token
            for rows, table in zip(staged.tables, chunk.kv.tables.by_group, strict=True):
                count = ceil_div(end_token, table.page_tokens)
                rows[row, :count] = table.host_numbers[:count]
            filled.append((chunk.token_ids[0], end_token, *self._slots_of(chunk)))
        numbers = np.array(filled, np.int32).reshape(num_rows, self._num_columns)
        staged.columns[:, :num_rows] = numbers.T
        staged.columns[:, num_rows:] = self._idle_column
        for rows in staged.tables:
            rows[num_rows:, 0] = self._spare_kv.table.pages[0]
        staged.target.copy_(staged.source, non_blocking=True)

    @torch.inference_mode()
    def run(self, shape: StepShape) -> None:
        """Enqueue the computation of the rows that `fill` wrote with this shape."""
        sheet = self._sheet(self._numbers, shape)
        buffered = []
        if self._has_buffers:
            written = Places.at(sheet.write_slots.long())
            buffered.append(BufferedTokens.of(self._spare_buffer, None, written))
        places = [Places.at(slots) for slots in sheet.slots.long()]
        new_tokens = NewOnPages(self._spare_kv, places)
        forward = DecodeForward(
            self._calibration,
            StepPlaces(new_tokens, buffered),
            self._attention.step_attention(self._spare_kv, self._pages[shape]),
        )
        with forward_context(forward):
            logits = self._call(
                sheet.tokens.long().unsqueeze(0),
                sheet.lengths.long().sub_(1).unsqueeze(0),
                torch.arange(shape.rows, device=self._device),
                self._call.cache(),
            )
        if self._logits is None:
            self._logits = logits.new_zeros(self._most_rows, logits.shape[1], dtype=torch.float32)
        self._logits[: shape.rows].copy_(logits)

    def logits(self, num_rows: int) -> Tensor:
        """Return the last step's logits of the first rows, [num_rows, vocab] float32 on the CPU."""
        assert self._logits is not None, "logits of no step"  # noqa: S101
        return copy_to_host(self._logits[:num_rows])

    def _sizes(self, shape: StepShape) -> list[int]:
        """Return the number of items of the columns, and of each group's table."""
        pages = [ceil_div(shape.reach, num_tokens) for num_tokens in self._page_tokens]
        return [shape.rows * count for count in (self._num_columns, *pages)]

    def _split(self, numbers: Tensor, shape: StepShape) -> tuple[Tensor, list[Tensor]]:
        """View the columns, [columns, rows], and the tables, [rows, pages] each, of a shape."""
        sizes = self._sizes(shape)
        columns, *tables = numbers[: sum(sizes)].split_with_sizes(sizes)
        return columns.view(-1, shape.rows), [table.view(shape.rows, -1) for table in tables]

    def _sheet(self, numbers: Tensor, shape: StepShape) -> _Sheet:
        """View the sheet of a shape in the device memory that all shapes share."""
        columns, tables = self._split(numbers, shape)
        tokens, lengths, write_slots = columns[:PLAIN_COLUMNS].unbind(0)
        return _Sheet(tokens, lengths, write_slots, columns[PLAIN_COLUMNS:], tables)

    def _staged_sheet(self, staged: Tensor, shape: StepShape) -> _Staged:
        """View the sheet of a shape in the host memory that all shapes share."""
        num_items = sum(self._sizes(shape))
        columns, tables = self._split(staged, shape)
        return _Staged(
            columns.numpy(),
            [table.numpy() for table in tables],
            staged[:num_items],
            self._numbers[:num_items],
        )

    def _page_steps(self, shape: StepShape) -> list[PageStep]:
        sheet = self._sheet(self._numbers, shape)
        step = PageStep.of_single_tokens(
            sheet.tables[0],
            sheet.lengths,
            most_length=shape.reach,
            page_tokens=self._page_tokens[0],
        )
        return list(map(step.on, sheet.tables, self._page_tokens))

    def _supports_buffer(self, buffer: WriteBuffer | None) -> bool:
        return buffer is None or (self._has_buffers and buffer.keys is self._spare_buffer.keys)

    def _slots_of(self, chunk: Chunk) -> list[int]:
        """Return the slots of the chunk's token: in the write ring, then by group in working KV."""
        assert isinstance(chunk.kv, PagedKv)  # noqa: S101 - `can_run` has checked it

        position, buffer = chunk.kv.num_tokens, chunk.write_buffer
        if buffer is None or chunk.first_written_token > position:
            buffer, position = self._spare_buffer, 0
        tables, num_tokens = chunk.kv.tables.by_group, chunk.kv.num_tokens
        return [buffer.slots_of(position, 1)[0], *(t.slot_of(num_tokens) for t in tables)]


# ------------------------------------------------------------------------------------- graphs


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
