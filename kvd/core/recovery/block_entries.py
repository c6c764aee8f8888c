"""BlockEntries: all blocks that a restart finds, those of the index and those in DRAM, as columns.

Pure. There may be millions, and few of them become `Block` objects: hence numpy columns.
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
    """All blocks by number: first the entries of the index, then the adopted blocks in DRAM.

    Args:
        state: the cache's tables, with the adopted blocks in its index of blocks.
        entries: the entries of the index; those of blocks are taken out of it, to save memory.

    Attributes:
        is_sound: by block: whether it may be used.
    """

    def __init__(self, state: CacheState, entries: IndexEntries) -> None:
        self._state = state
        keys, of_extents, of_tokens = entries.take_blocks()
        self._num_entries = len(keys) // KEY_BYTES
        adopted = list(state.blocks)
        self._made: dict[int, Block] = {}
        self._keys = keys + b"".join(block.key for block in adopted)
        self._num_tokens = _extend(
            np.asarray(of_tokens, dtype=np.int32), [b.num_tokens for b in adopted]
        )
        extents = np.asarray(of_extents).astype(np.int64, copy=False)  # -1: not on SSD
        num_blocks = len(self._num_tokens)
        self.is_sound: Flags = np.ones(num_blocks, dtype=np.bool_)
        self._is_used: Flags = np.zeros(num_blocks, dtype=np.bool_)
        self._index: BlockColumns | None = index_blocks(self._keys, self._num_tokens)
        same_as = self._index.same_as
        self._is_copy: Flags = (same_as != np.arange(num_blocks)) & (same_as >= 0)
        self._reserve_extents(extents, same_as)
        is_on_ssd = self.is_sound[: self._num_entries]
        if not is_on_ssd.all():
            extents = np.where(is_on_ssd, extents, -1)
        self._extents: Ints = _extend(extents, [-1] * len(adopted))
        for index, block in enumerate(adopted, start=self._num_entries):
            self._join_adopted(int(same_as[index]), block)

    def join(self) -> SpanJoin:
        """Return a join that finds the blocks of spans."""
        assert self._index is not None, "blocks are found before they are used"
        return SpanJoin(self._index, self.is_sound)

    @property
    def is_object(self) -> Flags:
        """By block: whether it is a `Block` object, being in DRAM, and so cannot be packed."""
        is_object = np.zeros(len(self._extents), dtype=np.bool_)
        is_object[list(self._made)] = True
        return is_object

    def use(self, num_users: Ints) -> None:
        """Record how many spans use each block; after that no block can be found by key."""
        self._is_used = num_users > 0
        self._index = None  # free it: it takes as much memory as all other columns

    def block(self, index: int) -> Block:
        """Return a block's object, made if needed."""
        block = self._made.get(index)
        if block is None:
            block = self._made[index] = Block(self._key(index), int(self._num_tokens[index]))
            self._state.blocks.add(block)
        if block.extent is None and self._extents[index] >= 0:
            self._state.blocks.enter_ssd(block, int(self._extents[index]))
        return block

    def unneeded(self) -> list[BlockRecord]:
        """Return the entries that no session uses, or that are impossible (with extent -1)."""
        # Copies of an entry are kept: to drop one by its key would drop the first one, too.
        is_needed = self._is_copy | (self._is_used & (self._extents >= 0))
        return [
            BlockRecord(self._key(index), int(self._extents[index]), int(self._num_tokens[index]))
            for index in np.flatnonzero(~is_needed[: self._num_entries]).tolist()
        ]

    def pack_places(self, some: EntryIndexes) -> bytes:
        """Pack the places on SSD of some blocks, all of which have one."""
        return pack_places_of(self._keys, self._num_tokens, self._extents, some)

    def _key(self, index: int) -> bytes:
        return self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def _reserve_extents(self, extents: Ints, same_as: EntryIndexes) -> None:
        """Reserve the extents of the index's entries; impossible entries become unsound."""
        shape, num_entries = self._state.shape, self._num_entries
        block_tokens = self._state.layout.block_tokens
        num_tokens = self._num_tokens[:num_entries]
        fewest = self._state.layout.fewest_block_tokens
        sectors = [*map(shape.num_sectors, range(block_tokens + 1)), 0]  # last: impossible entries
        is_possible = (num_tokens >= fewest) & (num_tokens <= block_tokens)
        is_possible &= same_as[:num_entries] == np.arange(num_entries)
        num_sectors = np.array(sectors, dtype=np.int32)[np.where(is_possible, num_tokens, -1)]
        self.is_sound[:num_entries] = self._state.extents.restore(extents, num_sectors)

    def _join_adopted(self, entry: int, block: Block) -> None:
        """Join an adopted block with its entry: one of the index, or its own.

        A block that has the same key as an entry but another number of tokens is forgotten.
        """
        if entry < 0 or self._num_tokens[entry] != block.num_tokens:
            self._state.forget(block)
        else:
            self.is_sound[entry] = True
            self._made[entry] = block


def _extend(column: NDArray[Number], more: Sequence[int]) -> NDArray[Number]:
    """Return a column with more numbers behind it; not copied if there are none."""
    return np.concatenate((column, np.array(more, dtype=column.dtype))) if more else column
