"""PagePool: the memory of sequences' KV on pages, and of write buffers beside it.

    region     = page | page | ...   per layer keys [num_pages * page_tokens, kv_heads, head_dim]
                                     and values [..., value_dim]

Which pages are whose is the scheduler's account (`core/scheduling/held_slots.py`); where on them a
sequence's tokens are, its KV knows (`paged_kv.py`).
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
    divided,
    token_items_of,
)
from inference_svc.runtime.kv.paged_kv import PagedKv, PagedTokens, PageTables
from inference_svc.runtime.kv.states import StateShape
from inference_svc.runtime.memory import allocate_region, populate


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
