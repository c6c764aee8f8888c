"""LayerGroups: which layers have pages in common, so that others need not have as many. Pure.

All layers have tokens of one shape. A group is of `size` layers, or fewer; its layer number *n* has
its tokens in tensor number *n*, on the group's pages. So do those of other groups, on theirs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from inference_svc.core.scheduling.page_groups import PLAIN, PageGroups, page_groups
from inference_svc.runtime.kv.layer_tensors import LayerShape
from inference_svc.runtime.kv.windowed_kv import HeldWindows
from shared.types.units import ceil_div

MOST_PADDING = 8  # groups that are not full may lack one layer in so many


@dataclass(frozen=True)
class LayerGroups:
    """See the module docstring.

    Attributes:
        layers: by group, indexes of its layers; groups of layers without a window come first.
        pages: what sequences have of each.
    """

    layers: tuple[tuple[int, ...], ...]
    pages: PageGroups = PLAIN

    @classmethod
    def plain(cls, num_layers: int) -> "LayerGroups":
        """Return the one group of all layers."""
        return cls((tuple(range(num_layers)),))

    @classmethod
    def of(
        cls, windows: HeldWindows, shapes: Sequence[LayerShape], page_tokens: int
    ) -> "LayerGroups | None":
        """Return groups of layers with and without a window; None: there cannot be any.

        Args:
            windows: what is held of layers with a window.
            shapes: of all layers.
            page_tokens: number of tokens on a page.
        """
        first = shapes[0]
        if len(set(shapes)) > 1 or first.index is not None or first.is_latent:
            return None
        windowed = [index for index in range(len(shapes)) if index in windows.layers]
        full = [index for index in range(len(shapes)) if index not in windows.layers]
        size = group_size(len(full), len(windowed))
        without, having = _cut(full, size), _cut(windowed, size)
        pages = page_groups(len(without), len(having), windows.rows.num_rows, page_tokens)
        return cls((*without, *having), pages)

    @property
    def size(self) -> int:
        """Most layers of a group: so many have tensors of their own."""
        return max(map(len, self.layers))

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

    def has_window(self, group: int) -> bool:
        """Whether a group's layers have one."""
        return group >= self.pages.num_full


def group_size(num_full: int, num_windowed: int) -> int:
    """Choose how many layers groups have: as many as may be, if few places are left empty."""

    def padding(size: int) -> int:
        places = ceil_div(num_full, size) + ceil_div(num_windowed, size)
        return places * size - num_full - num_windowed

    sizes = range(min(num_full, num_windowed), 0, -1)
    return next(size for size in sizes if padding(size) * MOST_PADDING <= num_full + num_windowed)


def _cut(layers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(layers[start : start + size]) for start in range(0, len(layers), size)]
