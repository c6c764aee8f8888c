"""All blocks that recovery knows, by columns: which may be used, and where they lie. Pure."""

import numpy as np

from kvd.core.block import Block
from kvd.core.records import IndexRows
from kvd.core.row_join import BlockColumns, Flags, Ints, index_blocks
from kvd.core.state import CacheState
from shared.block_key import KEY_BYTES


class BlockRows:
    """All blocks there are: the rows of the index, and then those in DRAM.

    Attributes:
        columns: keys and sizes.
        extents: where they lie; -1: not on SSD.
        is_sound: which may be used.
    """

    def __init__(self, state: CacheState, rows: IndexRows) -> None:
        self._state = state
        self._keys = rows.block_keys
        self._num_rows = len(rows.block_keys) // KEY_BYTES
        self._adopted = list(state.blocks)
        self._made: dict[int, Block] = {}
        num_tokens = np.concatenate(
            (
                np.asarray(rows.block_tokens, dtype=np.int64),
                np.asarray([block.num_tokens for block in self._adopted], dtype=np.int64),
            )
        )
        keys = rows.block_keys + b"".join(block.key for block in self._adopted)
        self.columns: BlockColumns = index_blocks(keys, num_tokens)
        self.extents: Ints = np.full(len(num_tokens), -1, dtype=np.int64)
        self.is_sound: Flags = np.ones(len(num_tokens), dtype=np.bool_)
        self._is_used: Flags = np.zeros(len(num_tokens), dtype=np.bool_)
        self._take_extents(rows)
        for index, block in enumerate(self._adopted, start=self._num_rows):
            self._join_adopted(int(self.columns.same_as[index]), index, block)

    @property
    def is_object(self) -> Flags:
        """Which blocks are in DRAM, and so cannot be folded."""
        is_object = np.zeros(len(self.extents), dtype=np.bool_)
        is_object[list(self._made)] = True
        return is_object

    def use(self, num_users: Ints) -> None:
        """Note how many spans use each block."""
        self._is_used = num_users > 0

    def block(self, index: int) -> Block:
        """Find a block, or make it."""
        block = self._made.get(index)
        if block is None:
            key = self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            block = self._made[index] = Block(key, int(self.columns.num_tokens[index]))
            self._state.blocks.add(block)
        if block.extent is None and self.extents[index] >= 0:
            self._state.blocks.enter_ssd(block, int(self.extents[index]))
        return block

    def drop_unused(self) -> int:
        """Remove the rows that nothing needs, or that cannot be; returns how many."""
        is_copy = self.columns.same_as != np.arange(len(self.extents))  # its row is another's, too
        is_copy &= self.columns.same_as >= 0
        is_needed = self._is_used & (self.extents >= 0)
        dropped = np.flatnonzero(~is_needed[: self._num_rows] & ~is_copy[: self._num_rows]).tolist()
        for index in dropped:
            key = self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            extent = int(self.extents[index])
            num_tokens = int(self.columns.num_tokens[index])
            self._state.drop_row(key, extent if extent >= 0 else None, num_tokens)
        return len(dropped)

    def _take_extents(self, rows: IndexRows) -> None:
        """Let rows of the index own what they say they do, as far as that can be."""
        shape, num_rows = self._state.shape, self._num_rows
        block_tokens = self._state.layout.block_tokens
        num_tokens = self.columns.num_tokens[:num_rows]
        sectors_of = np.array([0, *map(shape.num_sectors, range(1, block_tokens + 1))])
        is_possible = (num_tokens > 0) & (num_tokens <= block_tokens)
        is_possible &= self.columns.same_as[:num_rows] == np.arange(num_rows)
        num_sectors = sectors_of[np.where(is_possible, num_tokens, 0)]
        extents = np.asarray(rows.extents).astype(np.int64)
        is_sound = self._state.extents.restore(extents, num_sectors)
        self.extents[:num_rows] = np.where(is_sound, extents, -1)
        self.is_sound[:num_rows] = is_sound

    def _join_adopted(self, row: int, index: int, block: Block) -> None:
        """Note which of all blocks one in DRAM is: that of a row, or one of its own."""
        if row == -1 or self.columns.num_tokens[row] != block.num_tokens:
            self.is_sound[index] = False
            self._state.forget(block)
        else:
            self.is_sound[row] = True
            self._made[row] = block
