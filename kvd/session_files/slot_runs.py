"""Copies of KV rows between arena slots and session files. Any thread.

A row is one token's bytes in one component (such as the keys) of one layer. Slots and frames hold
runs: all rows of one component, then those of the next. Pure, except that it writes to memory that
it is given.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvd.tiers.slot_rows import SlotRows
from shared.types.kv_layout import KVLayout


class SlotRuns:
    """The place of each component's rows in the slots of frame layout.

    Args:
        components: for each component its offset in a slot, and the bytes of frame row.
    """

    def __init__(self, components: Sequence[tuple[int, int]]) -> None:
        self._components = tuple(components)

    @classmethod
    def of_tokens(cls, layout: KVLayout) -> "SlotRuns":
        """Return the runs of blocks of tokens."""
        return cls(SlotRows(layout).components)

    @classmethod
    def of_windows(cls, layout: KVLayout) -> "tuple[SlotRuns, ...]":
        """Return the runs of each part of a window."""
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
        """Return rows [start, start + num_tokens) of a slot, run by run, without a copy.

        The slot has to stay leased until they are used.
        """
        return [
            slot[offset + start * row : offset + (start + num_tokens) * row]
            for offset, row in self._components
        ]

    def write_rows(self, slot: memoryview, row: int, rows: memoryview, wanted: range) -> None:
        """Write the rows in `wanted`, of those in `rows`, to a slot, from its row `row` on.

        `rows` holds a run for each component, as `read` returns them.
        """
        num_rows = len(rows) // max(1, sum(num_bytes for _, num_bytes in self._components))
        start = 0
        for offset, num_bytes in self._components:
            run = rows[start : start + num_rows * num_bytes]
            first, num_wanted = offset + row * num_bytes, len(wanted) * num_bytes
            from_byte = wanted.start * num_bytes
            slot[first : first + num_wanted] = run[from_byte : from_byte + num_wanted]
            start += len(run)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of frame frame.

    Attributes:
        token_offset: the first token's place in the session.
        num_tokens: their number.
        memory: a run of bytes for each component.
        is_borrowed: the memory belongs to the caller, and may change after `keep`.
    """

    token_offset: int
    num_tokens: int
    memory: memoryview
    is_borrowed: bool


class RowBuffer:
    """Rows that were read from a file and are not stored yet, in order.

    Attributes:
        token_offset: the first row's token, by its place in the session.
        num_tokens: number of rows of each component.
    """

    def __init__(self, token_bytes: int) -> None:
        """Make an empty buffer; `token_bytes`: bytes of frame token in all components."""
        self._token_bytes = token_bytes
        self.token_offset = 0
        self.num_tokens = 0
        self._frames: deque[_Rows] = deque()

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_tokens * self._token_bytes

    def add(self, rows: memoryview, num_tokens: int) -> None:
        """Append the rows of a frame, without a copy."""
        self._frames.append(_Rows(self.token_offset + self.num_tokens, num_tokens, rows, True))
        self.num_tokens += num_tokens

    def keep(self) -> None:
        """Copy rows that are in borrowed memory: the caller is about to reuse it."""
        self._frames = deque(
            replace(frame, memory=memoryview(bytes(frame.memory)), is_borrowed=False)
            if frame.is_borrowed
            else frame
            for frame in self._frames
        )

    def drop(self, num_tokens: int) -> None:
        """Remove the rows of the first `num_tokens` tokens."""
        self.token_offset += num_tokens
        self.num_tokens -= num_tokens
        frames = self._frames
        while frames and frames[0].token_offset + frames[0].num_tokens <= self.token_offset:
            frames.popleft()

    def write_to(
        self, slot: memoryview, runs: SlotRuns, token_offset: int, num_tokens: int
    ) -> None:
        """Write the rows of tokens [token_offset, + num_tokens) to the first rows of a slot."""
        end = token_offset + num_tokens
        for frame in self._frames:
            first = max(token_offset, frame.token_offset)
            last = min(end, frame.token_offset + frame.num_tokens)
            if first < last:
                wanted = range(first - frame.token_offset, last - frame.token_offset)
                runs.write_rows(slot, first - token_offset, frame.memory, wanted)
