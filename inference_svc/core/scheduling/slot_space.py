"""An allocator of contiguous slots: which pieces of the working KV's region are taken.

It knows offsets and lengths, and nothing of memory. Sequences' KV is allocated from the bottom
(best fit), write buffers from the top: so the short-lived buffers do not split the room that a long
sequence's KV will need.

Invariants (`check`):
    1. pieces do not overlap, and lie within the space;
    2. holes are exactly the ranges between the pieces, and no two of them touch.

Cost: O(pieces) per call; there are as many pieces as running sequences (tens), so that lists are
faster than trees.
"""

from bisect import bisect_left, insort


class SlotSpace:
    """The slots [0, num_slots), allocated in contiguous pieces."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 0, num_slots
        self.num_slots = num_slots
        self._holes = [(0, num_slots)] if num_slots else []  # (offset, length), by offset
        self._pieces: dict[int, int] = {}  # offset → length

    @property
    def num_free(self) -> int:
        """Number of slots in no piece; they need not be contiguous."""
        return self.num_slots - sum(self._pieces.values())

    def allocate(self, num_slots: int, *, from_top: bool = False) -> int | None:
        """Allocate a piece; return its first slot, or None if no hole is long enough.

        Args:
            num_slots: number of slots, at least one.
            from_top: whether to take the end of the highest hole that is long enough, instead of
                the beginning of the shortest one.
        """
        assert num_slots > 0, num_slots
        fitting = [hole for hole in self._holes if hole[1] >= num_slots]
        if not fitting:
            return None
        if from_top:
            start, length = fitting[-1]
            offset, remainder = start + length - num_slots, (start, length - num_slots)
        else:
            start, length = min(fitting, key=lambda hole: hole[1])  # among equals the lowest
            offset, remainder = start, (start + num_slots, length - num_slots)
        index = bisect_left(self._holes, (start, length))
        self._holes[index : index + 1] = [remainder] if remainder[1] else []
        self._pieces[offset] = num_slots
        return offset

    def free(self, offset: int) -> None:
        """Free the piece that begins at this slot, and merge it with holes that it touches."""
        assert offset in self._pieces, f"no piece begins at slot {offset}"
        end = offset + self._pieces.pop(offset)
        index = bisect_left(self._holes, (offset, 0))
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == offset:
            offset = self._holes.pop(index - 1)[0]
        insort(self._holes, (offset, end - offset))

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        ranges = sorted([*self._holes, *self._pieces.items()])
        holes = set(self._holes)
        position, after_hole = 0, False
        for offset, length in ranges:
            assert offset == position, f"gap or overlap at slot {offset}"
            assert length > 0, f"empty range at slot {offset}"
            is_hole = (offset, length) in holes and offset not in self._pieces
            assert not (is_hole and after_hole), f"holes touch at slot {offset}"
            position, after_hole = offset + length, is_hole
        assert position == self.num_slots, f"slots {position}… are nobody's"
