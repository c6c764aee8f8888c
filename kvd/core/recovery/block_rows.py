"""All blocks that recovery knows, by columns: which may be used, and where they lie. Pure."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.records import IndexRows
from kvd.core.recovery.row_join import BlockColumns, Flags, Ints, Rows, SpanJoin, index_blocks
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from shared.types.block_key import KEY_BYTES

Number = TypeVar("Number", np.int32, np.int64)


class BlockRows:
    """All blocks there are: the rows of the index, and then those in DRAM.

    Attributes:
        keys: of KEY_BYTES each, joined.
        num_tokens: of each.
        extents: where they lie; -1: not on SSD.
        is_sound: which may be used.
    """

    def __init__(self, state: CacheState, rows: IndexRows) -> None:
        self._state = state
        self._num_rows = len(rows.block_keys) // KEY_BYTES
        adopted = list(state.blocks)
        self._made: dict[int, Block] = {}
        self.keys = rows.block_keys + b"".join(block.key for block in adopted)
        self.num_tokens = _extended(
            np.asarray(rows.block_tokens, dtype=np.int32), [b.num_tokens for b in adopted]
        )
        extents = np.asarray(rows.extents).astype(np.int64, copy=False)
        num_blocks = len(self.num_tokens)
        self.is_sound: Flags = np.ones(num_blocks, dtype=np.bool_)
        self._is_used: Flags = np.zeros(num_blocks, dtype=np.bool_)
        self._index: BlockColumns | None = index_blocks(self.keys, self.num_tokens)
        same_as = self._index.same_as
        self._is_copy: Flags = (same_as != np.arange(num_blocks)) & (same_as >= 0)
        self._take_extents(extents, same_as)
        is_on_ssd = self.is_sound[: self._num_rows]
        if not is_on_ssd.all():
            extents = np.where(is_on_ssd, extents, -1)
        self.extents: Ints = _extended(extents, [-1] * len(adopted))
        for index, block in enumerate(adopted, start=self._num_rows):
            self._join_adopted(int(same_as[index]), index, block)

    def join(self) -> SpanJoin:
        """Have the blocks of spans found."""
        assert self._index is not None, "blocks are found before they are used"
        return SpanJoin(self._index, self.is_sound)

    @property
    def is_object(self) -> Flags:
        """Which blocks are in DRAM, and so cannot be folded."""
        is_object = np.zeros(len(self.extents), dtype=np.bool_)
        is_object[list(self._made)] = True
        return is_object

    def use(self, num_users: Ints) -> None:
        """Note how many spans use each block; none is to be found any more."""
        self._is_used = num_users > 0
        self._index = None  # it takes as much memory as all the rest

    def block(self, index: int) -> Block:
        """Find a block, or make it."""
        block = self._made.get(index)
        if block is None:
            block = self._made[index] = Block(self._key(index), int(self.num_tokens[index]))
            self._state.blocks.add(block)
        if block.extent is None and self.extents[index] >= 0:
            self._state.blocks.enter_ssd(block, int(self.extents[index]))
        return block

    def drop_unused(self) -> int:
        """Remove the rows that nothing needs, or that cannot be; returns how many."""
        is_needed = self._is_copy | (self._is_used & (self.extents >= 0))  # or its row is another's
        dropped = np.flatnonzero(~is_needed[: self._num_rows]).tolist()
        for index in dropped:
            extent = int(self.extents[index])
            num_tokens = int(self.num_tokens[index])
            self._state.drop_row(self._key(index), extent if extent >= 0 else None, num_tokens)
        return len(dropped)

    def _key(self, index: int) -> bytes:
        return self.keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def _take_extents(self, extents: Ints, same_as: Rows) -> None:
        """Let rows of the index own what they say they do, as far as that can be."""
        shape, num_rows = self._state.shape, self._num_rows
        block_tokens = self._state.layout.block_tokens
        num_tokens = self.num_tokens[:num_rows]
        sectors_of = np.array([0, *map(shape.num_sectors, range(1, block_tokens + 1))])
        is_possible = (num_tokens > 0) & (num_tokens <= block_tokens)
        is_possible &= same_as[:num_rows] == np.arange(num_rows)
        num_sectors = sectors_of[np.where(is_possible, num_tokens, 0)]
        self.is_sound[:num_rows] = self._state.extents.restore(extents, num_sectors)

    def _join_adopted(self, row: int, index: int, block: Block) -> None:
        """Note which of all blocks one in DRAM is: that of a row, or one of its own."""
        if row == -1 or self.num_tokens[row] != block.num_tokens:
            self.is_sound[index] = False
            self._state.forget(block)
        else:
            self.is_sound[row] = True
            self._made[row] = block


def _extended(column: NDArray[Number], more: Sequence[int]) -> NDArray[Number]:
    """Put more numbers behind a column; one that gets none is not copied."""
    return np.concatenate((column, np.array(more, dtype=column.dtype))) if more else column
