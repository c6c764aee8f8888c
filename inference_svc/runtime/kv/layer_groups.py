"""Layer groups: which tokens layers hold of a sequence, and which layers share pages. Pure.

Layers with a window hold the last tokens only (`HeldWindows`). On pages this needs groups of layers
(`LayerGroups`), so that layers with a window need fewer pages than the others:

    place        a tensor of [all pages * page_tokens] rows, each a token's key or value. All places
                 have one shape, unless all layers are one group: then each layer has its own place
    group        as many layers as there are places, or fewer: the group's *n*-th layer has its
                 tokens in the *n*-th place, on the group's pages. All groups share the places, on
                 pages of their own
    wide group   layers whose rows are `width` times as long as a place's rows: one of its pages has
                 page_tokens / width tokens, so it needs `width` pages for each page of a group of
                 width 1

    a page in one place                of a group of width 1   token 0 | token 1 | token 2 | token 3
                                       of a group of width 2   token 0           | token 1
                                                 its next page token 2           | token 3

So all pages have the same number of bytes, adjacent pages hold adjacent tokens, and the account of
pages counts a wide group as `width` groups (`PageGroups`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import prod
from typing import NamedTuple

from inference_svc.core.attention_window import HeldRows
from inference_svc.core.scheduling.page_groups import PLAIN, PageGroups, page_groups
from inference_svc.runtime.kv.layer_tensors import LayerShape, token_items_of
from shared.types.kv_layout import KVLayout
from shared.types.units import ceil_div

MOST_PADDING = 8  # empty places, in groups that are not full, are at most 1/8 of the used ones


class HeldWindows(NamedTuple):
    """The tokens that sequences hold in layers with a window.

    Attributes:
        rows: the number of these tokens, and what they save.
        layers: indices of the layers with a window.
    """

    rows: HeldRows
    layers: frozenset[int]

    @classmethod
    def of(
        cls,
        layout: KVLayout,
        shapes: Sequence[LayerShape],
        *,
        step_tokens: int,
        scored_tokens: int,
    ) -> "HeldWindows | None":
        """Return the held windows of a model; None: no layer has a window, or all have.

        Args:
            layout: the model's KV layout.
            shapes: the shapes of all layers.
            step_tokens: most tokens of a sequence that one step computes.
            scored_tokens: most queries at a prompt's end by which keys are scored.
        """
        layers = frozenset(index for index in range(len(shapes)) if layout.part_of(index))
        if not layers:
            return None
        # More is held than the window: a block, since loads begin and shared prefixes end at
        # blocks; or the scored queries, which are compared with keys only at the prompt's end.
        full = [shape for index, shape in enumerate(shapes) if index not in layers]
        rows = HeldRows(
            layout.window,
            max(layout.block_tokens, scored_tokens),
            step_tokens,
            token_items=token_items_of(shapes),
            full_items=token_items_of(full),
        )
        return cls(rows, layers)

    def rows_by_layer(self, num_layers: int, capacity_tokens: int) -> list[int]:
        """Return each layer's number of rows, for a sequence with room for so many tokens."""
        num_rows = self.rows.num_rows
        return [
            num_rows if index in self.layers else capacity_tokens for index in range(num_layers)
        ]


@dataclass(frozen=True)
class LayerGroups:
    """The groups of a model's layers, and the places that they share.

    Attributes:
        page_tokens: number of tokens on a page of a group of width 1.
        places: the shape of each place's rows.
        layers: by group, indices of its layers; groups of layers without a window come first.
        widths: by group, the length of its rows in rows of a place.
        pages: the groups as the account of pages counts them: a group of width n is n of them.
    """

    page_tokens: int
    places: tuple[LayerShape, ...]
    layers: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...] = (1,)
    pages: PageGroups = PLAIN

    @classmethod
    def plain(cls, shapes: Sequence[LayerShape], page_tokens: int) -> "LayerGroups":
        """Return a single group of all layers."""
        return cls(page_tokens, tuple(shapes), (tuple(range(len(shapes))),))

    @classmethod
    def of(
        cls, windows: HeldWindows, shapes: Sequence[LayerShape], page_tokens: int
    ) -> "LayerGroups | None":
        """Return groups of layers with and without a window; None: the shapes do not allow any.

        Args:
            windows: the tokens held in layers with a window.
            shapes: the shapes of all layers.
            page_tokens: number of tokens on a page of the layers with the shortest rows.
        """
        row = min(shapes, key=lambda shape: token_items_of([shape]))
        kinds: dict[tuple[bool, int], list[int]] = {}
        for index, shape in enumerate(shapes):
            width = _width(shape, row)
            if not width or page_tokens % width:
                return None
            kinds.setdefault((index in windows.layers, width), []).append(index)
        size = group_size({kind: len(layers) for kind, layers in kinds.items()})
        cut = [(*kind, layers) for kind in sorted(kinds) for layers in _cut(kinds[kind], size)]
        num_full, num_windowed = (
            sum(width for has_window, width, _ in cut if has_window is windowed)
            for windowed in (False, True)
        )
        return cls(
            page_tokens,
            (row,) * size,
            tuple(layers for *_, layers in cut),
            tuple(width for _, width, _ in cut),
            page_groups(num_full, num_windowed, windows.rows.num_rows, page_tokens),
        )

    def holding_all(self) -> "LayerGroups":
        """Return the same groups, all of which hold all tokens."""
        pages = PageGroups(num_full=self.pages.num_groups)
        return LayerGroups(self.page_tokens, self.places, self.layers, self.widths, pages)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The group of each layer."""
        found = {index: at for at, group in enumerate(self.layers) for index in group}
        return tuple(found[index] for index in sorted(found))

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """The place of each layer: its index in its group."""
        found = {index: at for group in self.layers for at, index in enumerate(group)}
        return tuple(found[index] for index in sorted(found))

    @cached_property
    def tokens_on_page(self) -> tuple[int, ...]:
        """Number of tokens on a page, by group."""
        return tuple(self.page_tokens // width for width in self.widths)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """By group, the end of its range among the groups of `pages`."""
        return tuple(accumulate(self.widths))

    def has_window(self, group: int) -> bool:
        """Whether a group's layers have a window."""
        return self._ends[group] > self.pages.num_full

    def tables(self, pages: Sequence[int]) -> list[list[int]]:
        """Return by group the page table of a sequence: its pages in the order of its tokens.

        Args:
            pages: all pages of the sequence, as the scheduler's account has them.
        """
        counted = self.pages.tables(pages)
        return [
            _interleave(counted[end - width : end])
            for width, end in zip(self.widths, self._ends, strict=True)
        ]


def group_size(counts: Mapping[tuple[bool, int], int]) -> int:
    """Choose the number of layers of a group: the largest that leaves few places empty.

    Args:
        counts: number of layers by (whether they have a window, their width).
    """
    num_used = sum(width * count for (_, width), count in counts.items())

    def padding(size: int) -> int:
        return sum(
            width * (ceil_div(count, size) * size - count) for (_, width), count in counts.items()
        )

    fewest = min(
        sum(count for (found, _), count in counts.items() if found is has_window)
        for has_window in (False, True)
    )
    return next(size for size in range(fewest, 0, -1) if padding(size) * MOST_PADDING <= num_used)


def _width(shape: LayerShape, row: LayerShape) -> int:
    """Return how many rows of `row`'s shape a token takes, key and value alike; 0: no number."""
    width, rest = divmod(prod(shape.key), prod(row.key))
    is_row = shape.index is None and not shape.is_latent
    return width if is_row and not rest and prod(shape.value) == width * prod(row.value) else 0


def _cut(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]


def _interleave(tables: Sequence[list[int]]) -> list[int]:
    """Return the first page of each table, then the second of each, and so on."""
    return tables[0] if len(tables) == 1 else list(chain.from_iterable(zip(*tables, strict=True)))
