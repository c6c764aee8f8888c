"""Where a sequence's tokens are: a table of pages, or one for each group of layers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inference_svc.runtime.kv.layer_groups import LayerGroups
from inference_svc.runtime.memory import placed_on
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
            self._placed = placed_on(self._device, self.numbers)
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
