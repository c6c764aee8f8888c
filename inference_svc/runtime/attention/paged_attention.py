"""PagedAttention: one attention call over the pages of all sequences of a step.

`TorchAttention` calls torch once for each sequence, and gathers tokens from pages that are not
adjacent. A GPU should read the pages of all sequences in place, in one call of a kernel that
receives page tables. This module does not know which kernel that is.

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
    """The options of an attention call in the form that kernels take; 0: none.

    Attributes:
        scale: factor of query-key products.
        softcap: bound of the scores by tanh.
        sinks: [heads], see `AttentionOptions`; None: none.
        window: number of latest keys that a query sees, its own included.
        chunk: a query sees keys from the last multiple of this number on.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    window: int = 0
    chunk: int = 0


class PageStep:
    """The page tables and sizes of a step's parts; tensors are int32, on the device.

    Attributes:
        tables: [parts, most pages], each part's pages in the order of its tokens.
        starts: [parts + 1], index of each part's first new token, and the number of new tokens.
        lengths: [parts], number of tokens that a part's last token sees, itself included.
        most_length: upper bound of `lengths`.
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
        """Store the parts.

        Args:
            sizes: (number of new tokens, length) of each part; the length of parts with a single
                new token is not used.
            tables: see the class.
            starts: see the class.
            lengths: see the class.
            most_length: see the class.
            page_tokens: see the class.
        """
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
    def copy_to(
        cls,
        parts: Sequence[tuple[Sequence[Tensor], int, int]],
        page_tokens: Sequence[int],
        device: torch.device,
    ) -> "list[PageStep]":
        """Copy the numbers of all parts to a device, in one copy.

        Args:
            parts: of each part its pages by group ([pages] int32, on the host), its number of new
                tokens, and its length.
            page_tokens: number of tokens on a page, by group.
            device: the device of their KV.

        Returns:
            A step for each group of layers; they differ in their page tables only.
        """
        sizes = [(size, length) for _, size, length in parts]
        numbers = [
            *accumulate((size for size, _ in sizes), initial=0),
            *(length for _, length in sizes),
        ]
        groups = zip(*[pages for pages, _, _ in parts], strict=True)
        tables = [pad_sequence(list(pages), batch_first=True) for pages in groups]
        flat = torch.cat((_int32(numbers), *[table.flatten() for table in tables]))
        starts, lengths, *flat_tables = copy_to_device(device, flat).split_with_sizes(
            [len(parts) + 1, len(parts), *[table.numel() for table in tables]]
        )
        step = cls(
            sizes,
            flat_tables[0].view(tables[0].shape),
            starts,
            lengths,
            most_length=max(length for _, _, length in parts),
            page_tokens=page_tokens[0],
        )
        return [
            step.on(found.view(table.shape), num_tokens)
            for found, table, num_tokens in zip(flat_tables, tables, page_tokens, strict=True)
        ]

    def on(self, tables: Tensor, page_tokens: int) -> "PageStep":
        """Return the same step with other page tables; both share the tiles on the device."""
        step = copy(self)
        step.tables, step.page_tokens = tables, page_tokens
        return step

    @classmethod
    def of_single_tokens(
        cls, tables: Tensor, lengths: Tensor, *, most_length: int, page_tokens: int
    ) -> "PageStep":
        """Return a step with one new token of each part, without copying.

        The contents of tables and lengths, on the device, may change before each computation.
        """
        num_parts = len(lengths)
        return cls(
            [(1, 0)] * num_parts,  # the host does not know the lengths
            tables,
            torch.arange(num_parts + 1, dtype=torch.int32, device=lengths.device),
            lengths,
            most_length=most_length,
            page_tokens=page_tokens,
        )

    def several_tokens(self) -> list[tuple[int, int, int]]:
        """Return (index, number of new tokens, length) of the parts with several new tokens."""
        return self._several

    def single_tokens(self) -> Tensor | None:
        """Return [n, 2] int32, (part, 0) for each part with one new token; None: there is none."""
        return self._make_tiles(1, self._single)

    def tiles(self, tile_tokens: int, parts: tuple[int, ...] | None = None) -> Tensor | None:
        """Divide parts with several new tokens into tiles.

        Args:
            tile_tokens: most tokens of a tile.
            parts: indices of some of these parts; None: all.

        Returns:
            [tiles, 2] int32, (part, number of its new tokens before the tile); None: there is no
            tile.
        """
        return self._make_tiles(tile_tokens, parts or tuple(part for part, _, _ in self._several))

    def _make_tiles(self, tile_tokens: int, parts: tuple[int, ...]) -> Tensor | None:
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
    """A kernel that attends over pages."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, step: PageStep, call: PageCall
    ) -> Tensor:
        """Attend each part's new tokens to their own part up to themselves.

        A part's result depends on this part alone.

        Args:
            query: [tokens, heads, head_dim], the parts one after another; heads and tokens of any
                stride.
            keys: [slots, kv_heads, head_dim]; token t of a part is in slot t % page_tokens of page
                number t // page_tokens of its table.
            values: [slots, kv_heads, value_dim].
            step: the page tables and sizes of the parts.
            call: scale, softcap, sinks and window of the call.

        Returns:
            [tokens, heads, value_dim]
        """


class PagedAttention:
    """The back-end over pages; steps with KV that is not on pages use `TorchAttention`."""

    def __init__(self, kernel: PageKernel) -> None:
        """Store the kernel."""
        self._kernel = kernel
        self._portable = TorchAttention()

    def prepare(self, parts: Sequence[Part]) -> StepAttention:
        """Plan a step; copies all page tables to the device at once."""
        kvs = [part.kv for part in parts if isinstance(part.kv, PagedKv)]
        if len(kvs) < len(parts):
            return self._portable.prepare(parts)
        kv = kvs[0]
        steps = PageStep.copy_to(
            [
                ([table.numbers for table in paged.tables.by_group], part.num_tokens, part.length)
                for paged, part in zip(kvs, parts, strict=True)
            ],
            kv.tables.groups.tokens_on_page,
            kv.device,
        )
        return self.step_attention(kv, steps)

    def step_attention(self, kv: PagedKv, steps: Sequence[PageStep]) -> StepAttention:
        """Return the attention of a step whose tables are on the device.

        Args:
            kv: any KV in the region that all parts are in.
            steps: the step by group of layers.
        """
        return PagedStepAttention(kv, steps, self._kernel)


class PagedStepAttention:
    """The attention of one step over pages; see `StepAttention` for shapes."""

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
