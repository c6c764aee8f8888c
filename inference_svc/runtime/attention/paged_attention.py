"""PagedAttention: one attention call over the pages of all sequences of a step.

`TorchAttention` calls torch once for each sequence, and gathers tokens that are on pages apart. A
GPU is to read pages where they are, of all sequences at once: by a kernel that is given tables of
pages. Which kernel that is, is not known here.

*Source:* PagedAttention: vLLM (SOSP'23).
"""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from inference_svc.runtime.attention.attention import Part, StepAttention, TorchAttention
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.kv.paged_kv import PagedKv
from inference_svc.runtime.memory import copy_to_device


class PageCall(NamedTuple):
    """The options of an attention call over pages, as kernels take them; 0: none.

    Attributes:
        scale: factor of query-key products.
        softcap: bound of the scores by tanh.
        sinks: [heads], see `AttentionOptions`; None: none.
        window: number of latest keys that a query sees, itself included.
        chunk: a query sees keys from the last multiple of this position on.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    window: int = 0
    chunk: int = 0


class PageStep:
    """Which pages the parts of a step read; tensors are int32, on the device.

    Attributes:
        tables: [parts, most pages] each part's pages in the order of its tokens.
        starts: [parts + 1] where each part's new tokens begin among all, and their number.
        lengths: [parts] number of tokens that a part's last one sees, itself included.
        most_length: no part is longer.
        page_tokens: number of tokens on a page.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        tables: Tensor,
        starts: Tensor,
        lengths: Tensor,
        *,
        most_length: int,
        page_tokens: int,
    ) -> None:
        """Store the parts; `sizes`: new tokens and length of each (any, if one token is new)."""
        self.tables = tables
        self.starts = starts
        self.lengths = lengths
        self.most_length = most_length
        self.page_tokens = page_tokens
        self._sizes = sizes
        self._several = [
            (part, size, length) for part, (size, length) in enumerate(sizes) if size > 1
        ]
        self._single = tuple(part for part, (size, _) in enumerate(sizes) if size == 1)
        self._tiles: dict[tuple[int, tuple[int, ...]], Tensor | None] = {}

    @classmethod
    def placed(
        cls,
        parts: Sequence[tuple[Sequence[Tensor], int, int]],
        page_tokens: Sequence[int],
        device: torch.device,
    ) -> "list[PageStep]":
        """Put the parts' numbers on the device, all in one copy: a step for each group of layers.

        They differ in their pages alone.

        Args:
            parts: pages by group ([pages] int32, on the host), number of new tokens, and length, of
                each.
            page_tokens: number of tokens on a page, by group.
            device: where their KV is.
        """
        sizes = [(size, length) for _, size, length in parts]
        numbers = [
            *accumulate((size for size, _ in sizes), initial=0),
            *(length for _, length in sizes),
        ]
        groups = zip(*[pages for pages, _, _ in parts], strict=True)
        tables = [pad_sequence(list(pages), batch_first=True) for pages in groups]
        flat = torch.cat((_int32(numbers), *[table.flatten() for table in tables]))
        starts, lengths, *placed = copy_to_device(device, flat).split_with_sizes(
            [len(parts) + 1, len(parts), *[table.numel() for table in tables]]
        )
        step = cls(
            sizes,
            placed[0].view(tables[0].shape),
            starts,
            lengths,
            most_length=max(length for _, _, length in parts),
            page_tokens=page_tokens[0],
        )
        return [
            step.on(found.view(table.shape), num_tokens)
            for found, table, num_tokens in zip(placed, tables, page_tokens, strict=True)
        ]

    def on(self, tables: Tensor, page_tokens: int) -> "PageStep":
        """Return the same step on other pages; what is placed for one is there for both."""
        other = copy(self)
        other.tables, other.page_tokens = tables, page_tokens
        return other

    @classmethod
    def of_single_tokens(
        cls, tables: Tensor, lengths: Tensor, *, most_length: int, page_tokens: int
    ) -> "PageStep":
        """Return a step of one new token of each part; nothing is copied.

        Tables and lengths, on the device, may have other contents whenever the step is computed.
        """
        num_parts = len(lengths)
        return cls(
            [(1, 0)] * num_parts,  # lengths are the device's
            tables,
            torch.arange(num_parts + 1, dtype=torch.int32, device=lengths.device),
            lengths,
            most_length=most_length,
            page_tokens=page_tokens,
        )

    def several_tokens(self) -> list[tuple[int, int, int]]:
        """Return the parts of several new tokens: which, how many they are, and their length."""
        return self._several

    def single_tokens(self) -> Tensor | None:
        """Return [n, 2], of parts of one new token: part, 0; None if there is none."""
        return self._tiled(1, self._single)

    def tiles(self, tile_tokens: int, parts: tuple[int, ...] | None = None) -> Tensor | None:
        """Divide parts of several new tokens into tiles.

        Args:
            tile_tokens: most tokens of a tile.
            parts: some of these parts; None: all.

        Returns:
            [tiles, 2]: part, number of its new tokens before the tile; None: there is no tile.
        """
        return self._tiled(tile_tokens, parts or tuple(part for part, _, _ in self._several))

    def _tiled(self, tile_tokens: int, parts: tuple[int, ...]) -> Tensor | None:
        if (tile_tokens, parts) not in self._tiles:
            numbers = [
                number
                for part in parts
                for first in range(0, self._sizes[part][0], tile_tokens)
                for number in (part, first)
            ]
            self._tiles[tile_tokens, parts] = (
                copy_to_device(self.tables.device, _int32(numbers).view(-1, 2)) if numbers else None
            )
        return self._tiles[tile_tokens, parts]


class PageKernel(Protocol):
    """Attends over pages."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, step: PageStep, call: PageCall
    ) -> Tensor:
        """Let each part's new tokens see their part up to themselves.

        A part's answer depends on this part alone.

        Args:
            query: [tokens, heads, head_dim], the parts one after another; heads and tokens of any
                stride.
            keys: [slots, kv_heads, head_dim]: token t of a part is in slot t % page_tokens of page
                number t // page_tokens of its table.
            values: [slots, kv_heads, value_dim].
            step: which pages the parts are on.
            call: scale, softcap, sinks and window.

        Returns:
            [tokens, heads, value_dim]
        """


class PagedAttention:
    """The back-end over pages; steps over KV that is on none are the portable one's."""

    def __init__(self, kernel: PageKernel) -> None:
        """Store what attends."""
        self._kernel = kernel
        self._portable = TorchAttention()

    def prepare(self, parts: Sequence[Part]) -> StepAttention:
        """Plan a step: one copy of all tables to the device."""
        pages = [part.kv for part in parts if isinstance(part.kv, PagedKv)]
        if len(pages) < len(parts):
            return self._portable.prepare(parts)
        kv = pages[0]
        steps = PageStep.placed(
            [
                ([table.numbers for table in paged.tables.by_group], part.num_tokens, part.length)
                for paged, part in zip(pages, parts, strict=True)
            ],
            kv.tables.groups.tokens_on_page,
            kv.device,
        )
        return self.over(kv, steps)

    def over(self, kv: PagedKv, steps: Sequence[PageStep]) -> StepAttention:
        """Plan a step that is described already, by group, over the region that this KV is in."""
        return PagedStepAttention(kv, steps, self._kernel)


class PagedStepAttention:
    """Attention of one step; see the protocol for shapes."""

    def __init__(self, kv: PagedKv, steps: Sequence[PageStep], kernel: PageKernel) -> None:
        self._keys, self._values = kv.keys.slots, kv.values.slots
        self._steps = [steps[group] for group in kv.tables.groups.group_of]
        self._kernel = kernel

    def attend(self, query: Tensor, layer_index: int, options: AttentionOptions) -> Tensor:
        """Attend each part to its own KV, [1, tokens, heads, value_dim]; see the protocol."""
        scale = query.shape[3] ** -0.5 if options.scale is None else options.scale
        call = PageCall(
            scale, options.softcap or 0.0, options.sinks, options.window or 0, options.chunk or 0
        )
        keys, values = self._keys[layer_index], self._values[layer_index]
        step = self._steps[layer_index]
        return self._kernel(query[0].transpose(0, 1), keys, values, step, call).unsqueeze(0)


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
