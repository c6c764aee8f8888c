"""Copies rows between slots and what session files hold, in threads of their own.

The copying is pure but for the memory, and good in any thread.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvd.tiers.slot_rows import SlotRows
from shared.types.kv_layout import KVLayout


class SlotRuns:
    """The rows of some slots of one layout: a run of bytes for each component of each layer there.

    Args:
        components: offset in a slot and bytes of one row of each.
    """

    def __init__(self, components: Sequence[tuple[int, int]]) -> None:
        self._components = tuple(components)

    @classmethod
    def of_tokens(cls, layout: KVLayout) -> "SlotRuns":
        """Make those of blocks of tokens."""
        return cls(SlotRows(layout).components)

    @classmethod
    def of_windows(cls, layout: KVLayout) -> "tuple[SlotRuns, ...]":
        """Make those of each part of a window."""
        return tuple(
            cls(
                [
                    (layout.component_offset(layer, index), component.token_bytes)
                    for layer in part
                    for index, component in enumerate(layout.layers[layer].components)
                ]
            )
            for part in layout.window_parts
        )

    def read(self, slot: memoryview, start: int, num_tokens: int) -> list[memoryview]:
        """Return rows [start, start + num_tokens) of a slot, in place: to be used up at once."""
        return [
            slot[offset + start * row : offset + (start + num_tokens) * row]
            for offset, row in self._components
        ]

    def write(
        self, slot: memoryview, first: int, num_tokens: int, runs: Sequence[bytearray]
    ) -> None:
        """Write rows [first, first + num_tokens) of the runs to the first rows of a slot.

        Args:
            slot: its memory.
            first: row of the runs.
            num_tokens: how many.
            runs: bytes of each component, row after row.
        """
        for (offset, row), run in zip(self._components, runs, strict=True):
            slot[offset : offset + num_tokens * row] = run[first * row : (first + num_tokens) * row]

    def write_rows(self, slot: memoryview, row: int, rows: memoryview, wanted: range) -> None:
        """Write some of the rows that are in `rows`, run after run, to a slot from `row` on."""
        num_rows = len(rows) // max(1, sum(num_bytes for _, num_bytes in self._components))
        start = 0
        for offset, num_bytes in self._components:
            run = rows[start : start + num_rows * num_bytes]
            first, num_wanted = offset + row * num_bytes, len(wanted) * num_bytes
            from_byte = wanted.start * num_bytes
            slot[first : first + num_wanted] = run[from_byte : from_byte + num_wanted]
            start += len(run)


class RowBuffer:
    """Rows that have come out of a file and are not stored yet, in order.

    Attributes:
        token_offset: of the first row.
        num_tokens: rows there are.
        runs: bytes of each component, row after row.
    """

    def __init__(self, row_bytes: Sequence[int]) -> None:
        self._row_bytes = tuple(row_bytes)
        self.token_offset = 0
        self.num_tokens = 0
        self.runs = [bytearray() for _ in self._row_bytes]

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.num_tokens * sum(self._row_bytes)

    def add(self, rows: memoryview, num_tokens: int) -> None:
        """Append the rows of a frame."""
        start = 0
        for run, row in zip(self.runs, self._row_bytes, strict=True):
            run.extend(rows[start : start + num_tokens * row])
            start += num_tokens * row
        self.num_tokens += num_tokens

    def drop(self, num_tokens: int) -> None:
        """Drop the first rows."""
        for run, row in zip(self.runs, self._row_bytes, strict=True):
            del run[: num_tokens * row]
        self.token_offset += num_tokens
        self.num_tokens -= num_tokens


T = TypeVar("T")


async def finished_in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a thread; when this returns, or is cancelled, the thread is done.

    So a caller may release slots afterwards, whatever has happened.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait((work,))
        raise
