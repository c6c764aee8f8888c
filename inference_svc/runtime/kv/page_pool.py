"""PagePool: a KV pool whose sequences' KV is on pages.

    region     = page | page | ...   per layer keys [num_pages * page_tokens, kv_heads, head_dim]
                                     and values [..., value_dim]

The scheduler's account knows which sequence has which pages (`core/scheduling/held_slots.py`); a
sequence's KV knows where on them its tokens are (`paged_kv.py`).
"""

from collections.abc import Sequence

import torch

from inference_svc.core.scheduling.held_slots import HeldSlots
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_groups import HeldWindows, LayerGroups
from inference_svc.runtime.kv.layer_tensors import (
    NO_PART,
    LayerShape,
    SlotTensors,
    divide_memory,
    token_items_of,
)
from inference_svc.runtime.kv.paged_kv import PagedKv, PagedTokens, PageTables
from inference_svc.runtime.kv.states import StateShape
from inference_svc.runtime.memory import allocate_region, populate


class PagePool(KVPool):
    """A pool of pages for sequences' KV; write buffers have contiguous memory as in `KVPool`.

    Behind the pages that the account counts there is a spare one, which belongs to no sequence
    (`spare_kv`): a step of a fixed number of rows writes its unused rows to it.

    Args:
        shapes: the shapes of all layers.
        slots: the scheduler's account of pages.
        num_buffer_slots: token slots for write buffers, beside the pages.
        device: where the tensors are.
        dtype: the tensors' element type.
        states: see `KVPool`.
        groups: the groups of layers that the account counts pages for; None: all layers are one.
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
        components = divide_memory(self._page_region, places, num_all, SlotTensors)
        by_layer = [(shape.key, shape.value, shape.index or NO_PART) for shape in shapes]
        self._components = [
            (component.by_layer(self.groups.place_of, of_layers), component.head_first())
            for component, of_layers in zip(components, zip(*by_layer, strict=True), strict=True)
            if component is not None
        ]

    @property
    def num_free(self) -> int:
        """Number of free token slots, on pages and for write buffers."""
        return super().num_free + self._slots.free_slots // self._slots.num_groups

    @property
    def num_pages(self) -> int:
        """Number of pages without the spare one behind them."""
        return self._slots.num_slots // self._page_tokens

    def spare_kv(self) -> PagedKv:
        """Return KV on the spare page: tokens written to it are never read."""
        return self.new_kv(self._page_tokens, [self.num_pages] * self._slots.num_groups)

    def new_kv(self, capacity_tokens: int, pages: Sequence[int] = ()) -> PagedKv:
        """Return empty KV on these pages.

        Args:
            capacity_tokens: number of tokens that the pages have room for, at least.
            pages: indices of the pages, which the scheduler's account has assigned.
        """
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
        """Fault in both regions; block until done or `close`; return the bytes faulted in."""
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
    """Make the pool of an engine: a `PagePool` if the scheduler counts pages, else a `KVPool`.

    Args:
        shapes: the shapes of all layers.
        slots: the scheduler's account of token slots.
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
