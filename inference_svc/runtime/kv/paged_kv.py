"""PagedKv: one sequence's KV on pages, which it may share with other sequences.

    sequence   = page, page, ...     its page table: token i is in slot i % page_tokens of page
                                     number i // page_tokens
    … by group = one table each      if layers with a window hold the last tokens only
                                     (`layer_groups.py`): then a page has tokens of one group of
                                     layers, and all groups' pages lie in the same memory

The memory is a region that all sequences share (`page_pool.py`). Attention on the CPU needs a
sequence's tokens side by side: adjacent pages are read in place, others are gathered first. The
results are the same.

Invariant: a page is written to only while a single sequence has it.

*Source:* PagedAttention: vLLM (SOSP'23); hybrid KV cache manager: vLLM.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_svc.core.scheduling.held_slots import PageCopy
from inference_svc.runtime.kv.layer_groups import LayerGroups
from inference_svc.runtime.kv.layer_tensors import ContiguousTokens, SlotTensors, TokenRoom
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.memory import copy_to_device
from shared.types.units import ceil_div


class PageTable:
    """The pages of one sequence, in the order of its tokens.

    Attributes:
        page_tokens: number of tokens on a page.
        pages: indices of the pages.
        numbers: [pages] int32: the same indices as a tensor on the host.
        host_numbers: a numpy view of `numbers`.
    """

    numbers: Tensor
    host_numbers: npt.NDArray[np.int32]

    def __init__(self, pages: Sequence[int], page_tokens: int, device: torch.device) -> None:
        self.page_tokens = page_tokens
        self.pages: list[int] = []
        self._device = device
        self.set(pages)

    def set(self, pages: Sequence[int]) -> None:
        """Replace the pages; the caller sees to their contents."""
        self.pages = list(pages)
        self.numbers = torch.tensor(self.pages, dtype=torch.int32)
        self.host_numbers = self.numbers.numpy()
        # Made on first use: attention kernels read page tables, and need neither.
        self._on_device: Tensor | None = None
        self._run_ends: list[int] | None = None

    def slot_of(self, token: int) -> int:
        """Return the slot of the token at a position."""
        page, offset = divmod(token, self.page_tokens)
        return self.pages[page] * self.page_tokens + offset

    def slots_of(self, first: int, num_tokens: int) -> list[int]:
        """Return the slots of the tokens at positions [first, first + num_tokens)."""
        return [self.slot_of(token) for token in range(first, first + num_tokens)]

    def slot_index(self, first: int, num_tokens: int) -> Tensor:
        """Return `slots_of` as [num_tokens] int64 on the device, where it is computed."""
        begin, end = first // self.page_tokens, ceil_div(first + num_tokens, self.page_tokens)
        firsts = self._index()[begin:end].long() * self.page_tokens
        slots = firsts[:, None] + torch.arange(self.page_tokens, device=self._device)
        return slots.flatten().narrow(0, first - begin * self.page_tokens, num_tokens)

    def is_run(self, first: int, num_tokens: int) -> bool:
        """Whether tokens from `first` on have adjacent slots; `num_tokens` is at least 1."""
        end = ceil_div(first + num_tokens, self.page_tokens)
        if self._run_ends is None:
            self._run_ends = _find_run_ends(self.pages)
        return self._run_ends[first // self.page_tokens] >= end

    def gather(self, layer: Tensor, first: int, num_tokens: int) -> Tensor:
        """Gather tokens of a layer, [slots, kv_heads, dim], to [num_tokens, kv_heads, dim]."""
        begin, end = first // self.page_tokens, ceil_div(first + num_tokens, self.page_tokens)
        by_page = layer.view(-1, self.page_tokens, *layer.shape[1:])
        found = by_page.index_select(0, self._index()[begin:end])
        return found.flatten(0, 1).narrow(0, first - begin * self.page_tokens, num_tokens)

    def _index(self) -> Tensor:
        """Return the pages' indices, [pages] int32 on the device."""
        if self._on_device is None:
            self._on_device = copy_to_device(self._device, self.numbers)
        return self._on_device


def _find_run_ends(pages: Sequence[int]) -> list[int]:
    """Return for each position in the table the end of the run of adjacent pages it is in."""
    ends = [number + 1 for number in range(len(pages))]
    for number in reversed(range(len(pages) - 1)):
        if pages[number] + 1 == pages[number + 1]:
            ends[number] = ends[number + 1]
    return ends


class PageTables:
    """The page tables of one sequence: one for each group of layers.

    Attributes:
        pages: all pages of the sequence, in the scheduler's order (`PageGroups`).
        by_group: the tables.
        groups: the groups of the model's layers.
        window_from: position of the first token that layers with a window hold.
    """

    def __init__(self, pages: Sequence[int], device: torch.device, groups: LayerGroups) -> None:
        self.groups = groups
        self.window_from = 0
        self.by_group = [PageTable((), num_tokens, device) for num_tokens in groups.tokens_on_page]
        self.set(pages)

    def set(self, pages: Sequence[int]) -> None:
        """Replace the pages of all tables; the caller sees to their contents."""
        self.pages = list(pages)
        for table, found in zip(self.by_group, self.groups.tables(pages), strict=True):
            table.set(found)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the pages have room for."""
        table = self.by_group[0]
        return len(table.pages) * table.page_tokens

    def of(self, layer_index: int) -> PageTable:
        """Return the table of a layer's group."""
        return self.by_group[self.groups.group_of[layer_index]]

    def first_token(self, layer_index: int) -> int:
        """Return the position of the first token that a layer holds."""
        has_window = self.groups.has_window(self.groups.group_of[layer_index])
        return self.window_from if has_window else 0


class PagedTokens:
    """One component of one sequence's tokens on pages; see `TokenTensors`.

    Attributes:
        slots: the region's tensors, which hold tokens of all sequences.
        dtype: the element type.
        device: the device of the tensors.
    """

    lies_by_position = True

    def __init__(self, slots: SlotTensors, by_heads: ContiguousTokens, tables: PageTables) -> None:
        """Store the parts.

        Args:
            slots: the whole region, per layer [slots, kv_heads, dim].
            by_heads: the same memory, per layer [1, kv_heads, slots, dim]; used only if all layers
                are one group.
            tables: the sequence's page tables.
        """
        self.slots = slots
        self.dtype, self.device = slots.dtype, slots.device
        self._by_heads = by_heads
        self._tables = tables

    def cut(self, first: int, num_tokens: int) -> Sequence[Tensor]:
        """Return tokens by layer, each [1, kv_heads, num_tokens, dim].

        Views if the tokens are adjacent in all layers; else each layer is gathered on access.
        """
        table, *further = self._tables.by_group
        if not further and table.is_run(first, num_tokens):
            return self._by_heads.cut(table.slot_of(first), num_tokens)
        return _GatheredLayers(self, self._tables, first, first + num_tokens)

    def group_of(self, layer_index: int) -> int:
        """Return the number of a layer's group; tokens have the same slots in all its layers."""
        return self._tables.groups.group_of[layer_index]

    def first_token(self, layer_index: int) -> int:
        """Return the position of the first token that a layer holds."""
        return self._tables.first_token(layer_index)

    def read(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return tokens that a layer holds, [num_tokens, kv_heads, dim]; a view or a copy."""
        if first < self.first_token(layer_index):
            raise AssertionError(f"token {first} of a layer that holds later ones")
        layer, table = self.slots[layer_index], self._tables.of(layer_index)
        if table.is_run(first, num_tokens):
            return layer.narrow(0, table.slot_of(first), num_tokens)
        return table.gather(layer, first, num_tokens)

    def room(self, layer_index: int, first: int, num_tokens: int) -> TokenRoom:
        """Return where a layer's tokens from `first` on lie."""
        layer, table = self.slots[layer_index], self._tables.of(layer_index)
        if table.is_run(first, num_tokens):
            return TokenRoom(layer, self.slots.token_dim, table.slot_of(first))
        return TokenRoom(layer, self.slots.token_dim, 0, table.slot_index(first, num_tokens))

    @contextmanager
    def filling(self, layer_index: int, first: int, num_tokens: int) -> Iterator[Tensor]:
        """Yield a tensor [num_tokens, kv_heads, dim] for the caller to fill with a layer's tokens.

        If they are not adjacent, it is a copy that is written back when the block is left.
        """
        layer, table = self.slots[layer_index], self._tables.of(layer_index)
        if table.is_run(first, num_tokens):
            yield layer.narrow(0, table.slot_of(first), num_tokens)
            return
        tokens = layer.new_empty(num_tokens, *layer.shape[1:])
        yield tokens
        layer.index_copy_(0, table.slot_index(first, num_tokens), tokens)

    def region(self, layer_index: int) -> Tensor:
        """View a layer's whole region, [slots, kv_heads, dim], with tokens of all sequences."""
        return self.slots[layer_index]

    def slot_index(self, layer_index: int, first: int, num_tokens: int) -> Tensor:
        """Return the slots of tokens in `region`, [num_tokens] int64 on the device."""
        return self._tables.of(layer_index).slot_index(first, num_tokens)

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy whole pages in all places, which covers the layers of every group."""
        sources, targets = (
            copy_to_device(self.device, torch.tensor(pages))
            for pages in zip(*[(copy.source, copy.target) for copy in copies], strict=True)
        )
        self.slots.copy_runs(self._tables.groups.page_tokens, sources, targets)


class _GatheredLayers(Sequence[Tensor]):
    """Tokens by layer, each [1, kv_heads, tokens that the layer holds, dim]; read on access."""

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
        tables: the sequence's page tables.
    """

    keys: PagedTokens
    values: PagedTokens
    indexes: PagedTokens | None = field(default=None, kw_only=True)
    tables: PageTables = field(kw_only=True)

    @property
    def table(self) -> PageTable:
        """The table of the first group: all layers, or layers without a window."""
        return self.tables.by_group[0]

    @property
    def window_from(self) -> int:
        """Position of the first token that layers with a window hold."""
        return self.tables.window_from

    def begin_at(self, window_from: int) -> None:
        """Let layers with a window begin at a token, if they have pages of their own."""
        if self.tables.groups.pages.num_windowed:
            self.tables.window_from = window_from

    def keep_from(self, window_from: int) -> None:
        """Drop tokens of layers with a window before a position; their slots are reused."""
        self.begin_at(window_from)

    def grow(self, pages: Sequence[int]) -> None:
        """Replace the pages by at least as many.

        Args:
            pages: all pages of the sequence. Only pages of layers with a window may differ from
                those before: the ones for the tokens written next.
        """
        is_windowed = self.tables.groups.pages.is_windowed
        kept = zip(pages, self.tables.pages, strict=False)
        is_grown = len(pages) >= len(self.tables.pages) and all(
            new == old or is_windowed(position) for position, (new, old) in enumerate(kept)
        )
        if not is_grown:
            raise AssertionError("a sequence that grows keeps its pages")
        self.tables.set(pages)
        self.capacity_tokens = self.tables.num_tokens

    @torch.inference_mode()
    def copy_shared_pages(self, copies: Sequence[PageCopy]) -> None:
        """Replace shared pages by copies (copy-on-write); no other thread uses the KV meanwhile."""
        if not copies:
            return
        for tokens in (self.keys, self.values, self.indexes):
            if tokens is not None:
                tokens.copy_pages(copies)
        pages = list(self.tables.pages)
        for copy in copies:
            pages[copy.position] = copy.target
        self.tables.set(pages)
