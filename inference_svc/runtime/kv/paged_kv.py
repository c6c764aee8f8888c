"""PagePool: sequences' KV on pages of one region, which several sequences may have in common.

    region     = page | page | ...   per layer keys [num_pages * page_tokens, kv_heads, head_dim]
                                     and values [..., value_dim]
    sequence   = page, page, ...     its page table: token i is in slot i % page_tokens of page
                                     number i // page_tokens

Which pages are whose is the scheduler's account (`core/scheduling/held_slots.py`); here is their
memory. Attention on the CPU reads tokens of one sequence side by side: where its pages are, it
reads them where they are; where they are not, they are gathered. The numbers are the same.

Invariant: a page is written to only while one sequence has it.

*Source:* PagedAttention: vLLM (SOSP'23).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_svc.core.scheduling.held_slots import HeldSlots, PageCopy
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import (
    ContiguousTokens,
    LayerShape,
    SlotTensors,
    divided,
    token_items_of,
)
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.kv.states import StateShape
from inference_svc.runtime.kv.windowed_kv import HeldWindows
from inference_svc.runtime.memory import allocate_region, placed_on, populate
from shared.types.units import ceil_div


class PageTable:
    """The pages of one sequence, in the order of its tokens.

    Attributes:
        page_tokens: number of tokens on a page.
        pages: indices of the pages.
        numbers: [pages] int32, the same on the host.
        host_numbers: numpy's view of `numbers`.
    """

    numbers: Tensor
    host_numbers: npt.NDArray[np.int32]

    def __init__(self, pages: Sequence[int], page_tokens: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        self.pages: list[int] = []
        self._device = device
        self.set(pages)

    def set(self, pages: Sequence[int]) -> None:
        """Take other pages; the contents are the caller's concern."""
        self.pages = list(pages)
        self.numbers = torch.tensor(self.pages, dtype=torch.int32)
        self.host_numbers = self.numbers.numpy()
        self._index = placed_on(self._device, self.numbers)
        # Per page: the page number behind the last that lies side by side with it.
        self._run_ends = [number + 1 for number in range(len(pages))]
        for number in reversed(range(len(pages) - 1)):
            if pages[number] + 1 == pages[number + 1]:
                self._run_ends[number] = self._run_ends[number + 1]

    def slot_of(self, token: int) -> int:
        """Return a token's slot."""
        page, offset = divmod(token, self.page_tokens)
        return self.pages[page] * self.page_tokens + offset

    def slots_of(self, first: int, num_tokens: int) -> list[int]:
        """Return the slots of tokens from `first` on."""
        return [self.slot_of(token) for token in range(first, first + num_tokens)]

    def slot_index(self, first: int, num_tokens: int) -> Tensor:
        """Return what `slots_of` does, [num_tokens] on the device: computed there."""
        begin, end = first // self.page_tokens, ceil_div(first + num_tokens, self.page_tokens)
        firsts = self._index[begin:end].long() * self.page_tokens
        slots = firsts[:, None] + torch.arange(self.page_tokens, device=self._device)
        return slots.flatten().narrow(0, first - begin * self.page_tokens, num_tokens)

    def is_run(self, first: int, num_tokens: int) -> bool:
        """Whether tokens from `first` on lie side by side; at least one."""
        end = ceil_div(first + num_tokens, self.page_tokens)
        return self._run_ends[first // self.page_tokens] >= end

    def gather(self, layer: Tensor, first: int, num_tokens: int) -> Tensor:
        """Copy tokens of [slots, kv_heads, dim] side by side; [num_tokens, kv_heads, dim]."""
        begin, end = first // self.page_tokens, ceil_div(first + num_tokens, self.page_tokens)
        by_page = layer.view(-1, self.page_tokens, *layer.shape[1:])
        found = by_page.index_select(0, self._index[begin:end])
        return found.flatten(0, 1).narrow(0, first - begin * self.page_tokens, num_tokens)


class PagedTokens:
    """One component of one sequence's tokens, on the pages of its table; see `TokenTensors`.

    Attributes:
        slots: the region's, of all sequences.
        dtype: the element type.
        device: the device that they are on.
    """

    def __init__(self, slots: SlotTensors, by_heads: ContiguousTokens, table: PageTable) -> None:
        """Store the parts.

        Args:
            slots: per layer, of the whole region, [slots, kv_heads, dim].
            by_heads: the same memory as attention takes it.
            table: of the sequence.
        """
        self.slots = slots
        self.dtype, self.device = slots.dtype, slots.device
        self._by_heads = by_heads
        self._table = table

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """Return tokens by layer, each [1, kv_heads, num_tokens, dim]; gathered one by one."""
        if self._table.is_run(first, num_tokens):
            return self._by_heads.cut(self._table.slot_of(first), num_tokens)
        return _GatheredLayers(self.slots, self._table, first, num_tokens)

    def first_token(self, _layer_index: int) -> int:
        """Return the first token that a layer holds: all hold all."""
        return 0

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return a layer's tokens, [num_tokens, kv_heads, dim]; a view, or a copy."""
        layer = self.slots[layer_index]
        if self._table.is_run(first, num_tokens):
            return layer.narrow(0, self._table.slot_of(first), num_tokens)
        return self._table.gather(layer, first, num_tokens)

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield [num_tokens, kv_heads, dim], to be written: a layer's tokens afterwards."""
        layer = self.slots[layer_index]
        if self._table.is_run(first, num_tokens):
            yield layer.narrow(0, self._table.slot_of(first), num_tokens)
            return
        tokens = layer.new_empty(num_tokens, *layer.shape[1:])
        yield tokens
        layer.index_copy_(0, self._table.slot_index(first, num_tokens), tokens)

    def region(self, layer_index: int) -> Tensor:
        """View the memory that a layer's tokens are in, [slots, kv_heads, dim]: that of all."""
        return self.slots[layer_index]

    def slot_index(self, first: int, num_tokens: int) -> Tensor:
        """Return where in `region` tokens are, [num_tokens] int64 on the device."""
        return self._table.slot_index(first, num_tokens)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages of all layers."""
        sources, targets = (
            placed_on(self.device, torch.tensor(pages))
            for pages in zip(*[(copy.source, copy.target) for copy in copies], strict=True)
        )
        for layer in self.slots.layers:
            by_page = layer.view(-1, self._table.page_tokens, *layer.shape[1:])
            by_page.index_copy_(0, targets, by_page.index_select(0, sources))


class _GatheredLayers(Sequence[Tensor]):
    """Some tokens by layer, each [1, kv_heads, num_tokens, dim]; gathered when asked for."""

    def __init__(self, slots: SlotTensors, table: PageTable, first: int, num_tokens: int) -> None:
        self._layers = slots.layers
        self._table = table
        self._first = first
        self._num_tokens = num_tokens

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, layer_index: int) -> Tensor:  # type: ignore[override]  # no slices
        found = self._table.gather(self._layers[layer_index], self._first, self._num_tokens)
        return found.transpose(0, 1).unsqueeze(0)


@dataclass(eq=False)
class PagedKv(SequenceKv):
    """One sequence's KV on pages.

    Attributes:
        table: its pages.
    """

    keys: PagedTokens
    values: PagedTokens
    indexes: PagedTokens | None = field(default=None, kw_only=True)
    table: PageTable = field(kw_only=True)

    def grow(self, pages: Sequence[int]) -> None:
        """Take more pages: those it has, and others behind them."""
        if list(pages[: len(self.table.pages)]) != self.table.pages:
            raise AssertionError("a sequence that grows keeps its pages")
        self.table.set(pages)
        self.capacity_tokens = len(pages) * self.table.page_tokens

    @torch.inference_mode()
    def own(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages that others have too, and take the copies instead; nobody else uses the KV."""
        if not copies:
            return
        for tokens in (self.keys, self.values, self.indexes):
            if tokens is not None:
                tokens.copy_pages(copies)
        pages = list(self.table.pages)
        for copy in copies:
            pages[copy.position] = copy.target
        self.table.set(pages)


class PagePool(KVPool):
    """A pool that lends sequences' KV page by page, and write buffers as ever.

    Behind the pages that are counted there is one that is nobody's (`spare_kv`): a step of a fixed
    number of tokens writes those to it that are none.

    Args:
        shapes: the shapes of all layers.
        slots: the scheduler's account of pages.
        num_buffer_slots: token slots for write buffers, beside the pages.
        device: where the tensors are.
        dtype: the tensors' element type.
        states: see `KVPool`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: HeldSlots,
        num_buffer_slots: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
        states: Sequence[StateShape] = (),
    ) -> None:
        """Reserve address space; memory comes with `prefault` or first use."""
        super().__init__(shapes, num_buffer_slots, device=device, dtype=dtype, states=states)
        num_slots = slots.num_slots
        self.num_token_slots += num_slots
        self._slots = slots
        self._page_tokens = slots.page_tokens
        num_all = num_slots + self._page_tokens
        self._page_region = allocate_region(num_all * token_items_of(shapes), device, dtype)
        self._components = [
            (component, component.seen_by_heads())
            for component in divided(self._page_region, shapes, num_all, SlotTensors)
            if component is not None
        ]

    @property
    def num_free(self) -> int:
        """Number of token slots that nobody has, on pages and for write buffers."""
        return super().num_free + self._slots.free_slots

    @property
    def num_pages(self) -> int:
        """Number of pages that are counted; the one behind them is nobody's."""
        return self._slots.num_slots // self._page_tokens

    def spare_kv(self) -> PagedKv:
        """Return KV on the page that is nobody's: what is written to it is never read."""
        return self.new_kv(self._page_tokens, [self.num_pages])

    def new_kv(self, capacity_tokens: int, pages: Sequence[int] = ()) -> PagedKv:
        """Return empty KV on these pages, with room for as many tokens at least."""
        if capacity_tokens > len(pages) * self._page_tokens:
            raise AssertionError(f"{len(pages)} pages for {capacity_tokens} tokens")
        table = PageTable(pages, self._page_tokens, self._page_region.device)
        keys, values, *others = (PagedTokens(*seen, table) for seen in self._components)
        capacity_tokens, indexes = len(pages) * self._page_tokens, others[0] if others else None
        states = self._new_states()
        return PagedKv(keys, values, capacity_tokens, indexes=indexes, table=table, states=states)

    def prefault(self) -> int:
        """Fault in both regions; block until done or `close`. Return the bytes faulted in."""
        return super().prefault() + populate(self._page_region, lambda: self._is_closed)


def make_pool(
    shapes: Sequence[LayerShape],
    slots: HeldSlots,
    *,
    num_buffer_slots: int,
    device: torch.device,
    dtype: torch.dtype,
    states: Sequence[StateShape] = (),
    windows: HeldWindows | None = None,
) -> KVPool:
    """Make the pool of an engine: of pages, if the scheduler counts pages.

    Args:
        shapes: the shapes of all layers.
        slots: the scheduler's account.
        num_buffer_slots: token slots for write buffers, beside the scheduler's.
        device: where the tensors are.
        dtype: the tensors' element type.
        states: see `KVPool`.
        windows: see `KVPool`; None where there are pages.
    """
    if slots.is_paged:
        return PagePool(shapes, slots, num_buffer_slots, device=device, dtype=dtype, states=states)
    num_slots = slots.num_slots + num_buffer_slots
    return KVPool(shapes, num_slots, device=device, dtype=dtype, states=states, windows=windows)
