"""DecodeStep: one new token of each of some sequences, computed from tensors that stay in place.

Whatever differs from step to step is on one sheet of numbers, with a row for each sequence:

    tokens | lengths | write slots | slots | pages of row 0 | pages of row 1 | ...

Slots and pages are there for each group of layers (`layer_groups.py`), usually one; the pages of
all rows on one group, then those on the next.

`fill` copies it to the device at once; `run` computes what is on it, and reads nothing else that
changes: so what it has enqueued once can be enqueued again as it is (`decode_graphs.py`). Rows
without a sequence are a token alone, on memory that is nobody's.

Invariant: `fill` is called only once the logits of the step before were read: until then its copy
may be under way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_svc.runtime.attention.paged_attention import PagedAttention, PageStep
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.step_forward import DecodeForward
from inference_svc.runtime.compute.step_places import BufferedTokens, NewOnPages, StepPlaces
from inference_svc.runtime.kv.layer_tensors import Places
from inference_svc.runtime.kv.page_pool import PagePool
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.kv.sequence_kv import WriteBuffer
from inference_svc.runtime.kv.write_ring import WriteRing
from inference_svc.runtime.memory import copied_to_host
from inference_svc.runtime.model.capture import ForwardCall
from inference_svc.runtime.model.forward import under
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.positions.recipes import Calibration
from shared.types.units import ceil_div


class StepShape(NamedTuple):
    """How much a step of one shape takes; what it computes depends on nothing else.

    Attributes:
        rows: most sequences.
        reach: most tokens of each, the new one included.
    """

    rows: int
    reach: int


class _Sheet(NamedTuple):
    """What a step computes; int32.

    Attributes:
        tokens: [rows] ids of the new tokens.
        lengths: [rows] of the sequences, with them.
        write_slots: [rows] where they go in the write ring.
        slots: [groups, rows] where they go in working KV.
        tables: by group [rows, pages] each sequence's pages, as many as there are.
    """

    tokens: Tensor
    lengths: Tensor
    write_slots: Tensor
    slots: Tensor
    tables: list[Tensor]


PLAIN_COLUMNS = 3  # before the slots of each group


class _Staged(NamedTuple):
    """The sheet of one shape where `fill` writes it, and the copy that takes it to the device.

    numpy's views: a call of torch takes longer than a row of numbers does.

    Attributes:
        columns: [columns, rows] int32, all of a sheet but the tables.
        tables: by group [rows, pages] int32.
        source: [items] int32, the same memory.
        target: [items] int32 on the device.
    """

    columns: npt.NDArray[np.int32]
    tables: list[npt.NDArray[np.int32]]
    source: Tensor
    target: Tensor


class DecodeStep:
    """See the module docstring; used by one thread at a time."""

    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Calibration,
        attention: PagedAttention,
        memory: tuple[PagePool, WriteRing],
        shapes: Sequence[StepShape],
    ) -> None:
        """Allocate what stays in place, for steps of these shapes over this memory."""
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

    def takes(self, chunks: Sequence[Chunk]) -> bool:
        """Whether these are single tokens of sequences in this memory, with nothing unusual."""
        return all(
            len(chunk.token_ids) == chunk.num_logits == 1
            and chunk.scores is None
            and chunk.pooler is None
            and chunk.kv.gate is None
            and chunk.kv.states is None
            and isinstance(chunk.kv, PagedKv)
            and chunk.kv.keys.slots is self._spare_kv.keys.slots
            and self._takes_buffer(chunk.write_buffer)
            for chunk in chunks
        )

    @torch.inference_mode()
    def fill(self, shape: StepShape, chunks: Sequence[Chunk]) -> None:
        """Put these chunks into the first rows, and nobody's memory into the others.

        Args:
            shape: with as many rows at least, which reach as far.
            chunks: those that the step `takes`.
        """
        staged, num_rows, filled = self._staged[shape], len(chunks), []
        for row, chunk in enumerate(chunks):
            assert isinstance(chunk.kv, PagedKv)  # noqa: S101 - it was taken
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
        """Compute the rows that `fill` was given with this shape; nothing is waited for."""
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
            self._attention.over(self._spare_kv, self._pages[shape]),
        )
        with under(forward):
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
        """Return the logits of the first rows that were computed last, as `ModelRunner.step`."""
        assert self._logits is not None, "logits of no step"  # noqa: S101
        return copied_to_host(self._logits[:num_rows])

    def _sizes(self, shape: StepShape) -> list[int]:
        """Return how many numbers the columns are, and the tables of each group."""
        pages = [ceil_div(shape.reach, num_tokens) for num_tokens in self._page_tokens]
        return [shape.rows * count for count in (self._num_columns, *pages)]

    def _divided(self, numbers: Tensor, shape: StepShape) -> tuple[Tensor, list[Tensor]]:
        """View the columns, [columns, rows], and the tables of a shape."""
        sizes = self._sizes(shape)
        columns, *tables = numbers[: sum(sizes)].split_with_sizes(sizes)
        return columns.view(-1, shape.rows), [table.view(shape.rows, -1) for table in tables]

    def _sheet(self, numbers: Tensor, shape: StepShape) -> _Sheet:
        """View the sheet of a shape in the memory that all of them share."""
        columns, tables = self._divided(numbers, shape)
        tokens, lengths, write_slots = columns[:PLAIN_COLUMNS].unbind(0)
        return _Sheet(tokens, lengths, write_slots, columns[PLAIN_COLUMNS:], tables)

    def _staged_sheet(self, staged: Tensor, shape: StepShape) -> _Staged:
        """View the sheet of a shape in the host's memory that all of them share."""
        num_items = sum(self._sizes(shape))
        columns, tables = self._divided(staged, shape)
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

    def _takes_buffer(self, buffer: WriteBuffer | None) -> bool:
        return buffer is None or (self._has_buffers and buffer.keys is self._spare_buffer.keys)

    def _slots_of(self, chunk: Chunk) -> list[int]:
        """Return where the chunk's token goes: in the write ring, and by group in working KV."""
        assert isinstance(chunk.kv, PagedKv)  # noqa: S101 - it was taken
        position, buffer = chunk.kv.num_tokens, chunk.write_buffer
        if buffer is None or chunk.first_written_token > position:
            buffer, position = self._spare_buffer, 0
        tables, num_tokens = chunk.kv.tables.by_group, chunk.kv.num_tokens
        return [buffer.slots_of(position, 1)[0], *(t.slot_of(num_tokens) for t in tables)]
