"""Copies rows of slots together into other slots, for compactions.

In some thread of the pool. A row of a component is a few hundred bytes to some KiB, and a block may
take its rows one by one from others: so the rows that one slot gives are copied at once, component
by component, in numpy, which gives the interpreter up for it.

Invariant: nothing is made of bytes that are not the ones stored: every source is compared with its
checksums before its rows are copied, because what is made gets checksums of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from kvd.core.records.actions import CompactRows, DenseBlock, RowRun
from kvd.tiers.slot_rows import BlockHasher, SlotRows
from shared.types.kv_layout import KVLayout

Rows = NDArray[np.uint8]  # [block_tokens, token_bytes]
Indexes = NDArray[np.intp]
_SLOT = attrgetter("slot_id")


class RowCopier:
    """Copies rows of one layout.

    Args:
        layout: of the slots.
        memory_of: slot id → its memory.
    """

    def __init__(self, layout: KVLayout, memory_of: Callable[[int], memoryview]) -> None:
        self._memory_of = memory_of
        self._hasher = BlockHasher(layout)
        self._block_tokens = layout.block_tokens
        rows = SlotRows(layout)
        self._components = [c for i in range(rows.num_layers) for c in rows.components(i)]

    def compact(self, action: CompactRows) -> list[bytes] | None:
        """Fill the slots; returns the checksums of each, None if a source is not what was stored.

        Padding, and rows behind the last one, are left as they are: nobody reads them.
        """
        for source in action.sources:
            memory = self._memory_of(source.slot_id)
            if not self._hasher.matches(memory, source.num_tokens, source.checksums):
                return None
        return [self._fill(block) for block in action.blocks]

    def _fill(self, block: DenseBlock) -> bytes:
        memory = self._memory_of(block.slot_id)
        for first, slot_id, indexes in _gathers(block.runs):
            source = self._memory_of(slot_id)
            rows = slice(first, first + len(indexes))
            for offset, token_bytes in self._components:
                copied = self._view(memory, offset, token_bytes)[rows]
                # "clip" (no index is outside) writes straight to `out`, without a buffer between
                self._view(source, offset, token_bytes).take(indexes, 0, copied, mode="clip")
        return self._hasher.checksums(memory, block.num_tokens)

    def _view(self, memory: memoryview, offset: int, token_bytes: int) -> Rows:
        count = self._block_tokens * token_bytes
        flat = np.frombuffer(memory, np.uint8, count, offset)
        return flat.reshape(self._block_tokens, token_bytes)


def _gathers(runs: Sequence[RowRun]) -> Iterator[tuple[int, int, Indexes]]:
    """What neighbouring runs take from one slot: (first row filled, slot, rows taken)."""
    first = 0
    for slot_id, of_slot in groupby(runs, key=_SLOT):
        indexes = np.concatenate([np.arange(r.start, r.start + r.num_tokens) for r in of_slot])
        yield first, slot_id, indexes
        first += len(indexes)
