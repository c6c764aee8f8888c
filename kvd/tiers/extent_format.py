"""How the blocks of one layout are laid down in extents: what readers and writers share.

Pure. Everything that depends on the layout only is computed once: a block of 80 layers is read in
less time than its layout takes to walk.
"""

from dataclasses import dataclass
from typing import NamedTuple

from kvd.core.records.extent_shape import ExtentShape
from kvd.core.records.rows import StoredBlock
from kvd.tiers.checksums import BlockHasher
from kvd.tiers.extent_header import HeaderFormat
from kvd.tiers.layer_groups import layer_groups
from kvd.tiers.slot_rows import SlotRows
from shared.types.kv_layout import KVLayout
from shared.types.units import SECTOR_BYTES, align_up


class ToWrite(NamedTuple):
    """A block on its way to its extent."""

    extent: int
    key: bytes
    num_tokens: int
    stored: StoredBlock
    memory: memoryview  # of its slot
    tenant: str


@dataclass(frozen=True)
class GroupPlan:
    """Some layers of an extent that move together.

    Attributes:
        layers: the layers.
        offset: of the first one, in the extent.
        num_bytes: of all their slices, padding included.
    """

    layers: range
    offset: int
    num_bytes: int


class ExtentFormat:
    """One layout's extents."""

    def __init__(self, layout: KVLayout) -> None:
        self.shape = ExtentShape(layout)
        self.header = HeaderFormat(self.shape)
        self.hasher = BlockHasher(layout)
        self.rows = SlotRows(layout)
        self.slot_bytes = layout.block_bytes
        self._block_tokens = layout.block_tokens
        self._plans: dict[tuple[int, float], tuple[GroupPlan, ...]] = {}
        self._token_bytes = tuple(layer.token_bytes for layer in layout.layers)

    def is_full(self, num_tokens: int) -> bool:
        """Whether the extent holds the slot's bytes as they are."""
        return num_tokens == self._block_tokens

    def used_bytes(self, layer_index: int, num_tokens: int) -> int:
        """Bytes of one layer slice that are hashed."""
        return self._token_bytes[layer_index] * num_tokens

    def slice_bytes(self, layer_index: int, num_tokens: int) -> int:
        """Bytes of one layer slice in its extent, padding included."""
        return align_up(self.used_bytes(layer_index, num_tokens), SECTOR_BYTES)

    def used_rows(
        self, memory: memoryview, layer_index: int, num_tokens: int
    ) -> bytes | memoryview:
        """Used bytes of one layer slice of a slot, side by side; a copy unless they are already."""
        runs = self.rows.runs(layer_index, num_tokens)
        if len(runs) == 1:
            ((start, end),) = runs
            return memory[start:end]
        return b"".join(memory[start:end] for start, end in runs)

    def scatter(
        self, layer_index: int, num_tokens: int, used: bytes | memoryview, memory: memoryview
    ) -> None:
        """Put used bytes that lie side by side where they belong in a slot."""
        done = 0
        for start, end in self.rows.runs(layer_index, num_tokens):
            memory[start:end] = used[done : done + end - start]
            done += end - start

    def plan(self, num_tokens: int, least_bytes: float) -> tuple[GroupPlan, ...]:
        """Groups of at least this many bytes; the first one follows the header."""
        known = self._plans.get((num_tokens, least_bytes))
        if known is None:
            known = self._plans[num_tokens, least_bytes] = self._plan(num_tokens, least_bytes)
        return known

    def _plan(self, num_tokens: int, least_bytes: float) -> tuple[GroupPlan, ...]:
        sizes = [self.slice_bytes(i, num_tokens) for i in range(len(self._token_bytes))]
        plans: list[GroupPlan] = []
        offset = self.header.num_bytes
        for layers in layer_groups(sizes, least_bytes):
            num_bytes = sum(sizes[layers.start : layers.stop])
            plans.append(GroupPlan(layers, offset, num_bytes))
            offset += num_bytes
        return tuple(plans)
