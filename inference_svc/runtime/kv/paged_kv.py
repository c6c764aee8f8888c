"""PagedKv: one sequence's KV on pages, which several sequences may have in common.

    sequence   = page, page, ...     its page table: token i is in slot i % page_tokens of page
                                     number i // page_tokens
    … by group = one table each      if layers with a window hold the last tokens only
                                     (`layer_groups.py`): a page has a group's tokens then, and
                                     layers of different groups have theirs in the same memory

The memory is that of all (`page_pool.py`). Attention on the CPU reads tokens of one sequence side
by side: where its pages are, it reads them where they are; where they are not, they are gathered.
The numbers are the same.

Invariant: a page is written to only while one sequence has it.

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
from inference_svc.runtime.kv.layer_tensors import ContiguousTokens, SlotTensors
from inference_svc.runtime.kv.sequence_kv import SequenceKv
from inference_svc.runtime.memory import copy_to_device
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
        # Made when they are asked for: kernels read tables, and need neither.
        self._placed: Tensor | None = None
        self._run_ends: list[int] | None = None

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
        firsts = self._index()[begin:end].long() * self.page_tokens
        slots = firsts[:, None] + torch.arange(self.page_tokens, device=self._device)
        return slots.flatten().narrow(0, first - begin * self.page_tokens, num_tokens)

    def is_run(self, first: int, num_tokens: int) -> bool:
        """Whether tokens from `first` on lie side by side; at least one."""
        end = ceil_div(first + num_tokens, self.page_tokens)
        if self._run_ends is None:
            self._run_ends = _run_ends(self.pages)
        return self._run_ends[first // self.page_tokens] >= end

    def gather(self, layer: Tensor, first: int, num_tokens: int) -> Tensor:
        """Copy tokens of [slots, kv_heads, dim] side by side; [num_tokens, kv_heads, dim]."""
        begin, end = first // self.page_tokens, ceil_div(first + num_tokens, self.page_tokens)
        by_page = layer.view(-1, self.page_tokens, *layer.shape[1:])
        found = by_page.index_select(0, self._index()[begin:end])
        return found.flatten(0, 1).narrow(0, first - begin * self.page_tokens, num_tokens)

    def _index(self) -> Tensor:
        """Return the pages' indices on the device."""
        if self._placed is None:
            self._placed = copy_to_device(self._device, self.numbers)
        return self._placed


def _run_ends(pages: Sequence[int]) -> list[int]:
    """Return for each page the number behind the last that lies side by side with it."""
    ends = [number + 1 for number in range(len(pages))]
    for number in reversed(range(len(pages) - 1)):
        if pages[number] + 1 == pages[number + 1]:
            ends[number] = ends[number + 1]
    return ends


class PageTables:
    """The pages of one sequence, and its tables: one for each group of layers.

    Attributes:
        pages: all of them, as the scheduler has them (`PageGroups`).
        by_group: the tables.
        groups: of the model's layers.
        window_from: first token that layers with a window hold.
    """

    def __init__(self, pages: Sequence[int], device: torch.device, groups: LayerGroups) -> None:
        self.groups = groups
        self.window_from = 0
        self.by_group = [PageTable((), num_tokens, device) for num_tokens in groups.tokens_on_page]
        self.set(pages)

    def set(self, pages: Sequence[int]) -> None:
        """Take other pages; the contents are the caller's concern."""
        self.pages = list(pages)
        for table, found in zip(self.by_group, self.groups.tables(pages), strict=True):
            table.set(found)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that there is room for."""
        table = self.by_group[0]
        return len(table.pages) * table.page_tokens

    def of(self, layer_index: int) -> PageTable:
        """Return the table of a layer's group."""
        return self.by_group[self.groups.group_of[layer_index]]

    def first_token(self, layer_index: int) -> int:
        """Return the first token that a layer holds."""
        has_window = self.groups.has_window(self.groups.group_of[layer_index])
        return self.window_from if has_window else 0


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
            copy_to_device(self.device, torch.tensor(pages))
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
