"""What layers hold of a sequence, and which of them have pages in common. Pure.

Layers with a window hold the last tokens only (`HeldWindows`). On pages that takes groups of layers
(`LayerGroups`), so that some need not have as many as others:

    place        a tensor of [all pages * page_tokens] rows, each a token's key or value; they are
                 of one shape, unless all layers are one group: then each layer has a place
    group        as many layers as there are places, or fewer: layer number *n* of it has its tokens
                 in place number *n*, on the group's pages. So do those of other groups, on theirs
    wide group   of layers whose rows are `width` times those of a place: a page has page_tokens /
                 width tokens of them, and for each page of other groups there are `width` of theirs

    a page in one place                of a group of width 1   token 0 | token 1 | token 2 | token 3
                                       of a group of width 2   token 0           | token 1
                                                    the next   token 2           | token 3

So all pages have as many bytes, those that lie side by side have tokens side by side, and who
counts pages counts a wide group as several (`PageGroups`).
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

MOST_PADDING = 8  # groups that are not full may lack one part in so many


class HeldWindows(NamedTuple):
    """What sequences hold in layers with a window.

    Attributes:
        rows: how many tokens that is.
        layers: indexes of these layers.
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
        """Return them for a model; None: no layer has a window, or all have.

        Args:
            layout: of what is stored of the model.
            shapes: of all layers.
            step_tokens: most tokens of a sequence that are computed at once.
            scored_tokens: most queries at a prompt's end that keys are scored by.
        """
        layers = frozenset(index for index in range(len(shapes)) if layout.part_of(index))
        if not layers:
            return None
        # What is loaded begins with a block, and what is shared ends with one; keys are scored by
        # queries that have waited for the prompt's last ones.
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
        """Return how many rows each layer has of a sequence with room for so many tokens."""
        num_rows = self.rows.num_rows
        return [
            num_rows if index in self.layers else capacity_tokens for index in range(num_layers)
        ]


@dataclass(frozen=True)
class LayerGroups:
    """See the module docstring.

    Attributes:
        page_tokens: number of tokens on a page of a group of width 1.
        places: the shapes of their rows.
        layers: by group, indexes of its layers; groups of layers without a window come first.
        widths: by group.
        pages: what sequences have of them; a group of a width is as many there.
    """

    page_tokens: int
    places: tuple[LayerShape, ...]
    layers: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...] = (1,)
    pages: PageGroups = PLAIN

    @classmethod
    def plain(cls, shapes: Sequence[LayerShape], page_tokens: int) -> "LayerGroups":
        """Return the one group of all layers."""
        return cls(page_tokens, tuple(shapes), (tuple(range(len(shapes))),))

    @classmethod
    def of(
        cls, windows: HeldWindows, shapes: Sequence[LayerShape], page_tokens: int
    ) -> "LayerGroups | None":
        """Return groups of layers with and without a window; None: there cannot be any.

        Args:
            windows: what is held of layers with a window.
            shapes: of all layers.
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
        """Return the same groups of layers, as if none had a window."""
        pages = PageGroups(num_full=self.pages.num_groups)
        return LayerGroups(self.page_tokens, self.places, self.layers, self.widths, pages)

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The group of each layer."""
        found = {index: at for at, group in enumerate(self.layers) for index in group}
        return tuple(found[index] for index in sorted(found))

    @cached_property
    def place_of(self) -> tuple[int, ...]:
        """Which layer of its group each layer is."""
        found = {index: at for group in self.layers for at, index in enumerate(group)}
        return tuple(found[index] for index in sorted(found))

    @cached_property
    def tokens_on_page(self) -> tuple[int, ...]:
        """Number of tokens on a page, by group."""
        return tuple(self.page_tokens // width for width in self.widths)

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """How many of `pages`' groups the groups up to each of them are."""
        return tuple(accumulate(self.widths))

    def has_window(self, group: int) -> bool:
        """Whether a group's layers have one."""
        return self._ends[group] > self.pages.num_full

    def tables(self, pages: Sequence[int]) -> list[list[int]]:
        """Return by group on which pages a sequence's tokens are, in order."""
        counted = self.pages.tables(pages)
        return [
            _in_turn(counted[end - width : end])
            for width, end in zip(self.widths, self._ends, strict=True)
        ]


def group_size(counts: Mapping[tuple[bool, int], int]) -> int:
    """Choose how many layers groups have: as many as may be, if few places are left empty.

    Args:
        counts: how many layers there are, by whether they have a window, and by their width.
    """
    all_of_it = sum(width * count for (_, width), count in counts.items())

    def padding(size: int) -> int:
        return sum(
            width * (ceil_div(count, size) * size - count) for (_, width), count in counts.items()
        )

    fewest = min(
        sum(count for (found, _), count in counts.items() if found is has_window)
        for has_window in (False, True)
    )
    return next(size for size in range(fewest, 0, -1) if padding(size) * MOST_PADDING <= all_of_it)


def _width(shape: LayerShape, row: LayerShape) -> int:
    """Return how many rows of one shape a token of another takes, key and value; 0: no number."""
    width, rest = divmod(prod(shape.key), prod(row.key))
    is_row = shape.index is None and not shape.is_latent
    return width if is_row and not rest and prod(shape.value) == width * prod(row.value) else 0


def _cut(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]


def _in_turn(tables: Sequence[list[int]]) -> list[int]:
    """Return the first page of each table, then the second of each, and so on."""
    return tables[0] if len(tables) == 1 else list(chain.from_iterable(zip(*tables, strict=True)))
