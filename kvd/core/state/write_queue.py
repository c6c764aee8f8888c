"""Dirty blocks that are to be written, oldest request first. Pure.

A block is here from the request until its write is issued. What extents they need is known at any
moment: partial blocks share theirs.
"""

from collections import OrderedDict
from collections.abc import Iterator

from kvd.core.records.extent_shape import ExtentShape
from kvd.core.state.block import Block
from kvd.core.state.extents import ExtentTable
from shared.types.units import ceil_div


class WriteQueue:
    """See the module docstring."""

    def __init__(self, shape: ExtentShape, extents: ExtentTable) -> None:
        self._shape = shape
        self._extents = extents
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._num_whole = 0
        self._num_packed_sectors = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks.values())

    def holds(self, block: Block) -> bool:
        """Whether the block waits."""
        return self._blocks.get(block.key) is block

    def add(self, block: Block) -> None:
        """Queue a block; it keeps its place if it waits already."""
        if not self.holds(block):
            self._blocks[block.key] = block
            self._count(block, 1)

    def discard(self, block: Block) -> None:
        """Take a block out, if it waits."""
        if self.holds(block):
            del self._blocks[block.key]
            self._count(block, -1)

    @property
    def oldest(self) -> Block:
        """Its write is issued next; there is one."""
        return next(iter(self._blocks.values()))

    @property
    def newest(self) -> Block:
        """It is refused first; there is one."""
        return next(reversed(self._blocks.values()))

    def num_short(self, num_freed: int) -> int:
        """Whole extents that are missing, if `num_freed` are given back soon.

        Packed blocks are taken to fit without gaps, so it may turn out too low.
        """
        num_unpacked = self._num_packed_sectors - self._extents.num_free_packed
        num_needed = self._num_whole
        num_needed += ceil_div(max(0, num_unpacked), self._extents.sectors_per_extent)
        return max(0, num_needed - self._extents.num_free - num_freed)

    def _count(self, block: Block, sign: int) -> None:
        num_sectors = self._shape.num_sectors(block.num_tokens)
        if self._extents.is_packed(num_sectors):
            self._num_packed_sectors += sign * num_sectors
        else:
            self._num_whole += sign
