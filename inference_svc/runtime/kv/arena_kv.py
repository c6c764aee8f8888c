"""ArenaKv: the mapped arena of one layout as tensors, and copies of rows from and to its slots.

One tensor per layer and component spans all slots, so that rows of many slots move in one call
instead of one per slot.

Owns the views; knows no sequences' KV and no positions.

Invariant: the views keep the arena mapped (`shared.kvd_client.arena_map`): what they show stays
readable for as long as they live, though it means something only under a lease.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from inference_svc.runtime.memory import ThreadScratch
from shared.types.kv_layout import ITEM_BYTES, KVLayout


class Arena(Protocol):
    """Where slots are mapped."""

    @property
    def memory(self) -> memoryview:
        """All slots, one after another."""

    @property
    def slot_bytes(self) -> int:
        """Distance between slots."""

    @property
    def num_slots(self) -> int:
        """How many there are."""


class SlotRun:
    """The same rows [start, start + num_rows) of some slots, in this order."""

    def __init__(self, slot_ids: Sequence[int], start: int, num_rows: int) -> None:
        """Store them; `slot_ids` is not empty."""
        self.slot_ids = slot_ids
        self.start = start
        self.num_rows = num_rows

    @property
    def num_tokens(self) -> int:
        """Rows of all slots together."""
        return len(self.slot_ids) * self.num_rows

    def split(self, max_tokens: int) -> "list[SlotRun]":
        """Cut into runs of at most so many tokens, or of one slot if that has more already."""
        step = max(1, max_tokens // self.num_rows)
        if step >= len(self.slot_ids):
            return [self]
        return [
            SlotRun(self.slot_ids[begin : begin + step], self.start, self.num_rows)
            for begin in range(0, len(self.slot_ids), step)
        ]

    def placed(self, rows: Tensor) -> Tensor:
        """View contiguous rows [n, heads, dim] as `gather` fills them."""
        return rows.view(len(self.slot_ids), self.num_rows, *rows.shape[1:])

    @cached_property
    def indices(self) -> Tensor:
        """The slot ids as a tensor."""
        return torch.tensor(self.slot_ids)

    @cached_property
    def is_consecutive(self) -> bool:
        """Whether the slots lie side by side, in order."""
        first = self.slot_ids[0]
        return first >= 0 and list(self.slot_ids) == list(range(first, first + len(self.slot_ids)))


class ScatteredTokens:
    """Rows here and there, one by one: many short runs, as a discard leaves them."""

    num_rows = 1

    def __init__(self, slot_ids: Tensor, rows: Tensor) -> None:
        """Store the slot and the row in it of each, [n] both."""
        self.slot_ids = slot_ids
        self.rows = rows

    @property
    def num_tokens(self) -> int:
        """Rows there are."""
        return len(self.rows)

    def split(self, max_tokens: int) -> "list[ScatteredTokens]":
        """Cut into parts of at most so many."""
        return [
            ScatteredTokens(
                self.slot_ids[first : first + max_tokens], self.rows[first:][:max_tokens]
            )
            for first in range(0, self.num_tokens, max_tokens)
        ]

    def placed(self, rows: Tensor) -> Tensor:
        """View rows [n, heads, dim] as `gather` fills them."""
        return rows


class ArenaKv:
    """See the module docstring; any thread may copy rows that its lease covers."""

    def __init__(self, arena: Arena, layout: KVLayout) -> None:
        """View the arena; done once per arena, since it takes some microseconds per component.

        Raises:
            ValueError: if the arena is closed, or its slots are too small for a block.
        """
        if arena.slot_bytes < layout.block_bytes:
            raise ValueError(
                f"slots of {arena.slot_bytes} bytes for blocks of {layout.block_bytes}"
            )
        self.layout = layout
        self.num_slots = arena.num_slots
        memory = arena.memory
        num_bytes = arena.slot_bytes * arena.num_slots
        dtypes = {component.dtype for layer in layout.layers for component in layer.components}
        flat = {
            dtype: torch.frombuffer(
                memory, dtype=getattr(torch, dtype), count=num_bytes // ITEM_BYTES[dtype]
            )
            for dtype in dtypes
        }
        self._scratch = {
            dtype: ThreadScratch(torch.device("cpu"), getattr(torch, dtype)) for dtype in dtypes
        }
        self._views = [
            [
                self._view(flat[component.dtype], arena.slot_bytes, layer_index, index)
                for index, component in enumerate(layer.components)
            ]
            for layer_index, layer in enumerate(layout.layers)
        ]

    def view(self, layer_index: int, component_index: int) -> Tensor:
        """View one component of all slots, [num_slots, block_tokens, *shape]."""
        return self._views[layer_index][component_index]

    def scratch(self, layer_index: int, component_index: int, num_tokens: int) -> Tensor:
        """Return this thread's scratch for rows of a component, [num_tokens, *shape]."""
        component = self.layout.layers[layer_index].components[component_index]
        return self._scratch[component.dtype].take(num_tokens, *component.shape)

    def gather(
        self, layer_index: int, component_index: int, run: SlotRun | ScatteredTokens, out: Tensor
    ) -> None:
        """Copy a run's rows to `out`, shaped as by `run.placed`, with any strides."""
        if isinstance(run, ScatteredTokens):
            self._gather_scattered(self._views[layer_index][component_index], run, out)
            return
        rows = self._rows(layer_index, component_index, run)
        if out.device.type == "cpu":
            torch.index_select(rows, 0, run.indices, out=out)
        else:
            out.copy_(rows.index_select(0, run.indices))

    def _gather_scattered(self, view: Tensor, run: ScatteredTokens, out: Tensor) -> None:
        """Copy rows one by one; as one index where slots are a whole number of rows apart."""
        rows_apart, odd = divmod(view.stride(0), view.stride(1))
        if odd or self.num_slots == 0:
            out.copy_(view[run.slot_ids, run.rows])
            return
        num_rows = (self.num_slots - 1) * rows_apart + view.shape[1]
        flat = view.as_strided((num_rows, *view.shape[2:]), view.stride()[1:])
        indices = run.slot_ids * rows_apart + run.rows
        if out.device.type == "cpu":
            torch.index_select(flat, 0, indices, out=out)
        else:
            out.copy_(flat.index_select(0, indices))

    def scatter(self, layer_index: int, component_index: int, run: SlotRun, source: Tensor) -> None:
        """Copy `source`, shaped as `out` of `gather`, to a run's rows; no other byte changes."""
        rows = self._rows(layer_index, component_index, run)
        if run.is_consecutive:  # five times as fast for a few slots
            rows.narrow(0, run.slot_ids[0], len(run.slot_ids)).copy_(source)
        else:
            rows.index_copy_(0, run.indices, source.cpu())

    def _rows(self, layer_index: int, component_index: int, run: SlotRun) -> Tensor:
        """View the run's rows of every slot."""
        return self._views[layer_index][component_index].narrow(1, run.start, run.num_rows)

    def _view(self, flat: Tensor, slot_bytes: int, layer_index: int, index: int) -> Tensor:
        layout = self.layout
        component = layout.layers[layer_index].components[index]
        item_bytes = ITEM_BYTES[component.dtype]
        strides = [1]
        for size in reversed((layout.block_tokens, *component.shape)[1:]):
            strides.append(strides[-1] * size)
        return flat.as_strided(
            (self.num_slots, layout.block_tokens, *component.shape),
            (slot_bytes // item_bytes, *reversed(strides)),
            layout.component_offset(layer_index, index) // item_bytes,
        )
