"""All blocks that a restart finds, as columns: those of the index, and those in DRAM.

Pure. There may be millions, of which few become objects.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.entries import BlockRecord, IndexEntries
from kvd.core.recovery.entry_join import (
    BlockColumns,
    EntryIndexes,
    Flags,
    Ints,
    SpanJoin,
    index_blocks,
    pack_places_of,
)
from kvd.core.state.block import Block
from kvd.core.state.cache_state import CacheState
from shared.types.block_key import KEY_BYTES

Number = TypeVar("Number", np.int32, np.int64)


class BlockEntries:
    """All blocks there are: the entries of the index, which are taken, and then those in DRAM.

    Attributes:
        is_sound: which may be used.
    """

    def __init__(self, state: CacheState, entries: IndexEntries) -> None:
        self._state = state
        keys, of_extents, of_tokens = entries.take_blocks()
        self._num_entries = len(keys) // KEY_BYTES
        adopted = list(state.blocks)
        self._made: dict[int, Block] = {}
        self._keys = keys + b"".join(block.key for block in adopted)
        self._num_tokens = _extended(
            np.asarray(of_tokens, dtype=np.int32), [b.num_tokens for b in adopted]
        )
        extents = np.asarray(of_extents).astype(np.int64, copy=False)  # -1: not on SSD
        num_blocks = len(self._num_tokens)
        self.is_sound: Flags = np.ones(num_blocks, dtype=np.bool_)
        self._is_used: Flags = np.zeros(num_blocks, dtype=np.bool_)
        self._index: BlockColumns | None = index_blocks(self._keys, self._num_tokens)
        same_as = self._index.same_as
        self._is_copy: Flags = (same_as != np.arange(num_blocks)) & (same_as >= 0)
        self._take_extents(extents, same_as)
        is_on_ssd = self.is_sound[: self._num_entries]
        if not is_on_ssd.all():
            extents = np.where(is_on_ssd, extents, -1)
        self._extents: Ints = _extended(extents, [-1] * len(adopted))
        for index, block in enumerate(adopted, start=self._num_entries):
            self._join_adopted(int(same_as[index]), block)

    def join(self) -> SpanJoin:
        """Have the blocks of spans found."""
        assert self._index is not None, "blocks are found before they are used"
        return SpanJoin(self._index, self.is_sound)

    @property
    def is_object(self) -> Flags:
        """Which blocks are in DRAM, and so cannot be packed."""
        is_object = np.zeros(len(self._extents), dtype=np.bool_)
        is_object[list(self._made)] = True
        return is_object

    def use(self, num_users: Ints) -> None:
        """Record how many spans use each block; none is to be found any more."""
        self._is_used = num_users > 0
        self._index = None  # it takes as much memory as all the rest

    def block(self, index: int) -> Block:
        """Find a block, or make it."""
        block = self._made.get(index)
        if block is None:
            block = self._made[index] = Block(self._key(index), int(self._num_tokens[index]))
            self._state.blocks.add(block)
        if block.extent is None and self._extents[index] >= 0:
            self._state.blocks.enter_ssd(block, int(self._extents[index]))
        return block

    def unneeded(self) -> list[BlockRecord]:
        """Return the entries that nothing needs, or that cannot be: those have the extent -1."""
        is_needed = self._is_copy | (
            self._is_used & (self._extents >= 0)
        )  # or its entry is another's
        return [
            BlockRecord(self._key(index), int(self._extents[index]), int(self._num_tokens[index]))
            for index in np.flatnonzero(~is_needed[: self._num_entries]).tolist()
        ]

    def pack_places(self, some: EntryIndexes) -> bytes:
        """Pack the places of some of them, which have one."""
        return pack_places_of(self._keys, self._num_tokens, self._extents, some)

    def _key(self, index: int) -> bytes:
        return self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def _take_extents(self, extents: Ints, same_as: EntryIndexes) -> None:
        """Let entries of the index own what they say they do, as far as that can be."""
        shape, num_entries = self._state.shape, self._num_entries
        block_tokens = self._state.layout.block_tokens
        num_tokens = self._num_tokens[:num_entries]
        fewest = self._state.layout.fewest_block_tokens
        sectors = [*map(shape.num_sectors, range(block_tokens + 1)), 0]  # the last: none can be
        is_possible = (num_tokens >= fewest) & (num_tokens <= block_tokens)
        is_possible &= same_as[:num_entries] == np.arange(num_entries)
        num_sectors = np.array(sectors, dtype=np.int32)[np.where(is_possible, num_tokens, -1)]
        self.is_sound[:num_entries] = self._state.extents.restore(extents, num_sectors)

    def _join_adopted(self, entry: int, block: Block) -> None:
        """Record which of all blocks one in DRAM is: that of an entry, or one of its own.

        One that has a key in common with an entry, and no more, is not found, and forgotten.
        """
        if entry < 0 or self._num_tokens[entry] != block.num_tokens:
            self._state.forget(block)
        else:
            self.is_sound[entry] = True
            self._made[entry] = block


def _extended(column: NDArray[Number], more: Sequence[int]) -> NDArray[Number]:
    """Put more numbers behind a column; one that gets none is not copied."""
    return np.concatenate((column, np.array(more, dtype=column.dtype))) if more else column
