"""Extents of the SSD tier: runs of sectors, numbered by their first sector.

Pure. The tier is a row of *whole extents* of `sectors_per_extent` each. A run longer than half a
whole extent takes one for itself. Shorter runs, those of partial blocks, share *packing extents*,
first fit. A packing extent whose sectors are all free again becomes a whole extent again.

Freed extents are reused before unused ones are taken, because a segment is allocated on disk when
its first extent is. Invariant: a sector is free, or is owned by one block, write, drop or
relocation.

When the capacity is reduced, extents behind the new end stay in use until they are freed or
relocated (kvd/core/io/relocating.py), but nothing is allocated there any more. As long as no more
extents are in use than the capacity, there is a free one before the end for each one behind it.

Every call but set_capacity, trim and restore is O(1) in the number of extents: packing extents are
bit masks of their free sectors, indexed by the length of their longest free run.
"""

from collections import OrderedDict
from heapq import heappop, heappush

import numpy as np
from numpy.typing import ArrayLike, NDArray


class ExtentTable:
    """Which extents are free.

    Args:
        num_extents: how many whole extents may be in use.
        sectors_per_extent: length of the run of a full block.
    """

    def __init__(self, num_extents: int, sectors_per_extent: int) -> None:
        self._capacity = num_extents
        self.sectors_per_extent = sectors_per_extent
        self.num_used_sectors = 0
        self._num_doubled = 0  # whole extents that count for a block that has two, see relocate()
        self.num_free_packed = 0  # free sectors of packing extents before the end
        self._all_free = (1 << sectors_per_extent) - 1
        self._next = 0  # whole extents from here on were never used
        self._returned: list[int] = []  # a heap: runs next to each other are transferred faster
        self._packing: dict[int, int] = {}  # whole extent -> mask of its free sectors
        # Packing extents before the end, by the length of their longest free run.
        self._by_run: dict[int, OrderedDict[int, None]] = {}
        self._runs = 0  # mask of the keys of _by_run

    def __len__(self) -> int:
        return self._capacity

    @property
    def num_used(self) -> int:
        """Number of whole extents in use, wholly or in part."""
        return self._next - len(self._returned)

    @property
    def num_free(self) -> int:
        """Number of whole extents that can be allocated now."""
        return max(0, self._capacity - self.num_used + self._num_doubled)

    @property
    def num_over(self) -> int:
        """How many whole extents more than the capacity are in use, for good."""
        return max(0, self.num_used - self._num_doubled - self._capacity)

    @property
    def num_surplus(self) -> int:
        """Number of whole extents behind the end, up to the last one that was used."""
        return max(0, self._next - self._capacity)

    def set_capacity(self, num_extents: int) -> None:
        """Allow more or fewer extents. Those in use stay in use; O(packing extents)."""
        first, end = sorted((self._capacity, num_extents))
        if first == end:
            return
        moved = [index for index in self._packing if first <= index < end]
        masks = [self._take_mask(index) for index in moved]
        self._capacity = num_extents
        for index, free in zip(moved, masks, strict=True):
            self._put_mask(index, free)

    def is_behind(self, extent: int) -> bool:
        """Whether an extent lies behind the end that the capacity sets."""
        return extent >= self._capacity * self.sectors_per_extent

    def trim(self) -> int:
        """Forget that the free extents at the end were ever used; O(free extents) if there are any.

        Returns:
            The number of whole extents up to the last one in use.
        """
        free = set(self._returned) if self._next - 1 in self._returned else set()
        while self._next - 1 in free:
            self._next -= 1
        if free:
            self._returned = sorted(index for index in free if index < self._next)  # a heap
        return self._next

    def is_packed(self, num_sectors: int) -> bool:
        """Whether runs of this length share a whole extent."""
        return 2 * num_sectors <= self.sectors_per_extent

    def can_allocate(self, num_sectors: int) -> bool:
        """Whether a run of this length can be allocated now."""
        return bool(self.num_free and self._has_place()) or self._fits_packed(num_sectors)

    def can_relocate(self, num_sectors: int) -> bool:
        """Whether there is a place before the end for a run that lies behind it."""
        return self._has_place() or self._fits_packed(num_sectors)

    def relocate(self, num_sectors: int) -> int:
        """Allocate a second place for a run that lies behind the end.

        The caller has checked that there is one, and calls `end_relocation` with one of both
        places. Until then a whole run does not count twice for `num_free` and `num_over`.

        Returns:
            The first sector of the new place.
        """
        self._num_doubled += not self.is_packed(num_sectors)
        return self.allocate(num_sectors)

    def end_relocation(self, extent: int, num_sectors: int) -> None:
        """Free the old place of a run, or its new place if it was not moved."""
        self._num_doubled -= not self.is_packed(num_sectors)
        self.free(extent, num_sectors)

    def allocate(self, num_sectors: int) -> int:
        """Allocate a free run. The caller has checked that there is one.

        Returns:
            The first sector of the run.
        """
        assert 0 < num_sectors <= self.sectors_per_extent, f"a run of {num_sectors} sectors"
        self.num_used_sectors += num_sectors
        if not self.is_packed(num_sectors):
            return self._allocate_whole() * self.sectors_per_extent
        if self._fits_packed(num_sectors):
            index = next(iter(self._by_run[_lowest_bit(self._runs >> num_sectors) + num_sectors]))
        else:
            index = self._allocate_whole()
            self._set_mask(index, self._all_free)
        free = self._packing[index]
        start = _lowest_bit(_starts(free, num_sectors))
        self._set_mask(index, free & ~(_ones(num_sectors) << start))
        return index * self.sectors_per_extent + start

    def free(self, extent: int, num_sectors: int) -> None:
        """Free a run."""
        index, start = divmod(extent, self.sectors_per_extent)
        assert index < self._next, f"extent {extent} was never allocated"
        self.num_used_sectors -= num_sectors
        if not self.is_packed(num_sectors):
            heappush(self._returned, index)
            return
        run = _ones(num_sectors) << start
        assert not self._packing[index] & run, f"extent {extent} is free already"
        self._set_mask(index, self._packing[index] | run)

    def restore(self, extents: ArrayLike, num_sectors: ArrayLike) -> NDArray[np.bool_]:
        """Start with the runs that recovery found in use.

        Returns:
            Which of the runs are sound: inside the tier, at a place where such a run may lie, and
            not overlapping an earlier one. The others are not taken over.
        """
        first = np.asarray(extents, dtype=np.int64)
        lengths = np.asarray(num_sectors, dtype=np.int32)
        is_whole = 2 * lengths > self.sectors_per_extent
        is_sound = self._may_lie(first, lengths, is_whole)
        index = first // self.sectors_per_extent
        rows = np.flatnonzero(is_sound).astype(np.int32)
        num_touched = int(index.max(where=is_sound, initial=-1)) + 1
        owners = np.zeros(num_touched, dtype=np.int32)
        owners[index[rows[::-1]]] = rows[::-1]  # numpy keeps the last assignment: the first row
        is_sound[rows] &= (owners[index[rows]] == rows) | ~is_whole[rows]
        self._restore_packed(first, lengths, is_sound, is_whole)
        self.num_used_sectors = int(lengths[is_sound].sum())
        is_free = np.ones(num_touched, dtype=np.bool_)
        is_free[index[is_sound]] = False
        used = np.flatnonzero(~is_free)
        self._next = int(used[-1]) + 1 if len(used) else 0
        self._returned = np.flatnonzero(is_free[: self._next]).tolist()  # sorted: a heap
        return is_sound

    def _may_lie(
        self, first: NDArray[np.int64], lengths: NDArray[np.int32], is_whole: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return which runs lie inside the tier, at places where runs of their length may lie."""
        index, start = np.divmod(first, self.sectors_per_extent)
        may_lie = (first >= 0) & (index < self._capacity) & (lengths > 0)
        may_lie &= ~is_whole | (start == 0)
        return may_lie & (start + lengths <= self.sectors_per_extent)

    def _restore_packed(
        self,
        first: NDArray[np.int64],
        lengths: NDArray[np.int32],
        is_sound: NDArray[np.bool_],
        is_whole: NDArray[np.bool_],
    ) -> None:
        """Build the masks of packing extents. Runs that overlap are marked unsound."""
        packed = np.flatnonzero(is_sound & ~is_whole)
        if not len(packed):
            return  # common after a long prompt, and the rest would sort all whole runs
        taken = first[is_sound & is_whole]
        is_in_whole = np.isin(
            first[packed] // self.sectors_per_extent, taken // self.sectors_per_extent
        )
        masks: dict[int, int] = {}
        for row, is_inside in zip(packed.tolist(), is_in_whole.tolist(), strict=True):
            index, start = divmod(int(first[row]), self.sectors_per_extent)
            run = _ones(int(lengths[row])) << start
            free = masks.get(index, self._all_free)
            if is_inside or free & run != run:
                is_sound[row] = False
            else:
                masks[index] = free & ~run
        for index, free in masks.items():
            self._set_mask(index, free)

    def _fits_packed(self, num_sectors: int) -> bool:
        return self.is_packed(num_sectors) and bool(self._runs >> num_sectors)

    def _has_place(self) -> bool:
        """Whether a whole extent before the end is free."""
        return (self._returned[0] if self._returned else self._next) < self._capacity

    def _allocate_whole(self) -> int:
        assert self._has_place(), "no extent is free"
        if self._returned:
            return heappop(self._returned)
        self._next += 1
        return self._next - 1

    def _set_mask(self, index: int, free: int) -> None:
        """Set the free sectors of a packing extent. One that is all free becomes whole again."""
        is_new = index not in self._packing
        if not is_new:
            self._take_mask(index)
        if free == self._all_free and not is_new:
            heappush(self._returned, index)
        else:
            self._put_mask(index, free)

    def _take_mask(self, index: int) -> int:
        """Remove a packing extent from the tables; returns its free sectors."""
        free = self._packing.pop(index)
        run = _longest_run(free)
        if index < self._capacity:
            self.num_free_packed -= free.bit_count()
        if run and index < self._capacity:
            del self._by_run[run][index]
            if not self._by_run[run]:
                del self._by_run[run]
                self._runs &= ~(1 << run)
        return free

    def _put_mask(self, index: int, free: int) -> None:
        """Enter a packing extent; one behind the end takes no more runs."""
        self._packing[index] = free
        if index >= self._capacity:
            return
        self.num_free_packed += free.bit_count()
        run = _longest_run(free)
        if run:
            self._by_run.setdefault(run, OrderedDict())[index] = None
            self._runs |= 1 << run


def _ones(num_bits: int) -> int:
    return (1 << num_bits) - 1


def _lowest_bit(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def _starts(free: int, length: int) -> int:
    """Return the mask whose bit i says that sectors [i, i + length) are free."""
    width = 1
    while width < length:
        step = min(width, length - width)
        free &= free >> step
        width += step
    return free


def _longest_run(free: int) -> int:
    """Return the length of the longest run of ones; O(log) operations on the mask."""
    if not free:
        return 0
    levels = [free]  # levels[k], bit i: 2**k ones from bit i on
    while doubled := levels[-1] & (levels[-1] >> (1 << (len(levels) - 1))):
        levels.append(doubled)
    length, starts = 1 << (len(levels) - 1), levels.pop()
    for k in reversed(range(len(levels))):
        longer = starts & (levels[k] >> length)
        if longer:
            starts = longer
            length += 1 << k
    return length
