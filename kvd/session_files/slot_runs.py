"""Copies rows between slots and what session files hold. Pure but for the memory; any thread."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one frame.

    Attributes:
        token_offset: of the first one.
        num_tokens: how many.
        memory: a run of bytes for each component.
        is_lent: whether the memory is somebody else's.
    """

    token_offset: int
    num_tokens: int
    memory: memoryview
    is_lent: bool


class RowBuffer:
    """Rows that have come out of a file and are not stored yet, in order.

    Attributes:
        token_offset: of the first row.
        num_tokens: rows there are.
    """

    def __init__(self, token_bytes: int) -> None:
        """Begin without rows, of so many bytes each."""
        self._token_bytes = token_bytes
        self.token_offset = 0
        self.num_tokens = 0
        self._frames: deque[_Rows] = deque()

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.num_tokens * self._token_bytes

    def add(self, rows: memoryview, num_tokens: int) -> None:
        """Append the rows of a frame, which stay where they are."""
        self._frames.append(_Rows(self.token_offset + self.num_tokens, num_tokens, rows, True))
        self.num_tokens += num_tokens

    def keep(self) -> None:
        """Copy what is there: the memory that it came in is about to be used again."""
        self._frames = deque(
            replace(one, memory=memoryview(bytes(one.memory)), is_lent=False)
            if one.is_lent
            else one
            for one in self._frames
        )

    def drop(self, num_tokens: int) -> None:
        """Drop the first rows."""
        self.token_offset += num_tokens
        self.num_tokens -= num_tokens
        frames = self._frames
        while frames and frames[0].token_offset + frames[0].num_tokens <= self.token_offset:
            frames.popleft()

    def write_to(
        self, slot: memoryview, runs: SlotRuns, token_offset: int, num_tokens: int
    ) -> None:
        """Write the rows of some tokens to the first rows of a slot."""
        end = token_offset + num_tokens
        for one in self._frames:
            first = max(token_offset, one.token_offset)
            last = min(end, one.token_offset + one.num_tokens)
            if first < last:
                wanted = range(first - one.token_offset, last - one.token_offset)
                runs.write_rows(slot, first - token_offset, one.memory, wanted)
