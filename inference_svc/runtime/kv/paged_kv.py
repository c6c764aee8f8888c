"""PagePool: sequences' KV on pages of one region, which several sequences may have in common.

    region     = page | page | ...   per layer keys [num_pages * page_tokens, kv_heads, head_dim]
                                     and values [..., value_dim]
    sequence   = page, page, ...     its page table: token i is in slot i % page_tokens of page
                                     number i // page_tokens
    … by group = one table each      if layers with a window hold the last tokens only
                                     (`layer_groups.py`): a page has a group's tokens then, and
                                     layers of different groups have theirs in the same memory

Which pages are whose is the scheduler's account (`core/scheduling/held_slots.py`); here is their
memory. Attention on the CPU reads tokens of one sequence side by side: where its pages are, it
reads them where they are; where they are not, they are gathered. The numbers are the same.

Invariant: a page is written to only while one sequence has it.

*Source:* PagedAttention: vLLM (SOSP'23); hybrid KV cache manager: vLLM.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference_svc.core.scheduling.held_slots import HeldSlots, PageCopy
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_groups import HeldWindows, LayerGroups
from inference_svc.runtime.kv.layer_tensors import (
    NO_PART,
    ContiguousTokens,
    LayerShape,
    SlotTensors,
    divided,
    token_items_of,
)
from inference_svc.runtime.kv.page_tables import PageTable, PageTables
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.kv.states import StateShape
from inference_svc.runtime.memory import allocate_region, placed_on, populate


class PagedTokens:
    """One component of one sequence's tokens, on the pages of its tables; see `TokenTensors`.

    Attributes:
        slots: the region's, of all sequences.
        dtype: the element type.
        device: the device that they are on.
    """

    lies_by_position = True

    def __init__(self, slots: SlotTensors, by_heads: ContiguousTokens, tables: PageTables) -> None:
        """Store the parts.

        Args:
            slots: per layer, of the whole region, [slots, kv_heads, dim].
            by_heads: the same memory as attention takes it, if all layers are of one group.
            tables: of the sequence.
        """
        self.slots = slots
        self.dtype, self.device = slots.dtype, slots.device
        self._by_heads = by_heads
        self._tables = tables

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """Return tokens by layer, each [1, kv_heads, num_tokens, dim]; gathered one by one."""
        table, *others = self._tables.by_group
        if not others and table.is_run(first, num_tokens):
            return self._by_heads.cut(table.slot_of(first), num_tokens)
        return _GatheredLayers(self, self._tables, first, first + num_tokens)

    def group_of(self, layer_index: int) -> int:
        """Return which group of layers has its tokens where this one has."""
        return self._tables.groups.group_of[layer_index]

    def first_token(self, layer_index: int) -> int:
        """Return the first token that a layer holds."""
        return self._tables.first_token(layer_index)

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return tokens that a layer holds, [num_tokens, kv_heads, dim]; a view, or a copy."""
        if first < self.first_token(layer_index):
            raise AssertionError(f"token {first} of a layer that holds later ones")
        layer, table = self.slots[layer_index], self._tables.of(layer_index)
        if table.is_run(first, num_tokens):
            return layer.narrow(0, table.slot_of(first), num_tokens)
        return table.gather(layer, first, num_tokens)

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield [num_tokens, kv_heads, dim], to be written: a layer's tokens afterwards."""
        layer, table = self.slots[layer_index], self._tables.of(layer_index)
        if table.is_run(first, num_tokens):
            yield layer.narrow(0, table.slot_of(first), num_tokens)
            return
        tokens = layer.new_empty(num_tokens, *layer.shape[1:])
        yield tokens
        layer.index_copy_(0, table.slot_index(first, num_tokens), tokens)

    def region(self, layer_index: int) -> Tensor:
        """View the memory that a layer's tokens are in, [slots, kv_heads, dim]: that of all."""
        return self.slots[layer_index]

    def slot_index(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return where in `region` tokens are, [num_tokens] int64 on the device."""
        return self._tables.of(layer_index).slot_index(first, num_tokens)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages of all layers, whatever their group."""
        sources, targets = (
            placed_on(self.device, torch.tensor(pages))
            for pages in zip(*[(copy.source, copy.target) for copy in copies], strict=True)
        )
        self.slots.copy_runs(self._tables.groups.page_tokens, sources, targets)


class _GatheredLayers(Sequence[Tensor]):
    """Some tokens by layer, each [1, kv_heads, tokens that it holds, dim]; read when asked for."""

    def __init__(self, tokens: PagedTokens, tables: PageTables, first: int, end: int) -> None:
        self._tokens = tokens
        self._tables = tables
        self._first = first
        self._end = end

    def __len__(self) -> int:
        return len(self._tokens.slots.layers)

    def __getitem__(self, layer_index: int) -> Tensor:  # type: ignore[override]  # no slices
        first = max(self._first, self._tables.first_token(layer_index))
        found = self._tokens.read(layer_index, first, self._end - first)
        return found.transpose(0, 1).unsqueeze(0)


@dataclass(eq=False)
class PagedKv(SequenceKv):
    """One sequence's KV on pages.

    Attributes:
        tables: its pages.
    """

    keys: PagedTokens
    values: PagedTokens
    indexes: PagedTokens | None = field(default=None, kw_only=True)
    tables: PageTables = field(kw_only=True)

    @property
    def table(self) -> PageTable:
        """The table of the first group: of all layers, or of some without a window."""
        return self.tables.by_group[0]

    @property
    def window_from(self) -> int:
        """First token that layers with a window hold."""
        return self.tables.window_from

    def begin_at(self, window_from: int) -> None:
        """Have layers with a window begin at a token, if they have pages of their own."""
        if self.tables.groups.pages.num_windowed:
            self.tables.window_from = window_from

    def keep_from(self, window_from: int) -> None:
        """Give back what layers with a window hold before a token: it is written over."""
        self.begin_at(window_from)

    def grow(self, pages: Sequence[int]) -> None:
        """Take more pages behind those it has, and others for what is written next."""
        windowed = self.tables.groups.pages.is_windowed
        kept = zip(pages, self.tables.pages, strict=False)
        is_grown = len(pages) >= len(self.tables.pages) and all(
            new == old or windowed(at) for at, (new, old) in enumerate(kept)
        )
        if not is_grown:
            raise AssertionError("a sequence that grows keeps its pages")
        self.tables.set(pages)
        self.capacity_tokens = self.tables.num_tokens

    @torch.inference_mode()
    def own(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages that others have too, and take the copies instead; nobody else uses the KV."""
        if not copies:
            return
        for tokens in (self.keys, self.values, self.indexes):
            if tokens is not None:
                tokens.copy_pages(copies)
        pages = list(self.tables.pages)
        for copy in copies:
            pages[copy.position] = copy.target
        self.tables.set(pages)


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
        groups: of layers, as the account has them; None: all are one.
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
        groups: LayerGroups | None = None,
    ) -> None:
        """Reserve address space; memory comes with `prefault` or first use."""
        super().__init__(shapes, num_buffer_slots, device=device, dtype=dtype, states=states)
        self.groups = groups or LayerGroups.plain(shapes, slots.page_tokens)
        num_slots = slots.num_slots
        self.num_token_slots += num_slots // slots.num_groups
        self._slots = slots
        self._page_tokens = slots.page_tokens
        num_all, places = num_slots + self._page_tokens, self.groups.places
        self._page_region = allocate_region(num_all * token_items_of(places), device, dtype)
        components = divided(self._page_region, places, num_all, SlotTensors)
        by_layer = [(shape.key, shape.value, shape.index or NO_PART) for shape in shapes]
        self._components = [
            (component.spread_over(self.groups.place_of, of_layers), component.seen_by_heads())
            for component, of_layers in zip(components, zip(*by_layer, strict=True), strict=True)
            if component is not None
        ]

    @property
    def num_free(self) -> int:
        """Number of token slots that nobody has, on pages and for write buffers."""
        return super().num_free + self._slots.free_slots // self._slots.num_groups

    @property
    def num_pages(self) -> int:
        """Number of pages that are counted; the one behind them is nobody's."""
        return self._slots.num_slots // self._page_tokens

    def spare_kv(self) -> PagedKv:
        """Return KV on the page that is nobody's: what is written to it is never read."""
        return self.new_kv(self._page_tokens, [self.num_pages] * self._slots.num_groups)

    def new_kv(self, capacity_tokens: int, pages: Sequence[int] = ()) -> PagedKv:
        """Return empty KV on these pages, with room for as many tokens at least."""
        tables = PageTables(pages, self._page_region.device, self.groups)
        if capacity_tokens > tables.num_tokens:
            raise AssertionError(f"{len(pages)} pages for {capacity_tokens} tokens")
        keys, values, *others = (PagedTokens(*seen, tables) for seen in self._components)
        return PagedKv(
            keys,
            values,
            tables.num_tokens,
            indexes=others[0] if others else None,
            tables=tables,
            states=self._new_states(),
        )

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
    groups: LayerGroups | None = None,
) -> KVPool:
    """Make the pool of an engine: of pages, if the scheduler counts pages.

    Args:
        shapes: the shapes of all layers.
        slots: the scheduler's account.
        num_buffer_slots: token slots for write buffers, beside the scheduler's.
        device: where the tensors are.
        dtype: the tensors' element type.
        states: see `KVPool`.
        windows: see `KVPool`.
        groups: see `PagePool`.
    """
    if slots.is_paged:
        return PagePool(
            shapes,
            slots,
            num_buffer_slots,
            device=device,
            dtype=dtype,
            states=states,
            groups=groups,
        )
    num_slots = slots.num_slots + num_buffer_slots
    return KVPool(shapes, num_slots, device=device, dtype=dtype, states=states, windows=windows)
