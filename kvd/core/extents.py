"""Extents of the SSD tier: block-sized places, numbered from 0.

Pure. Given-back extents are reused before new ones are taken, because segments are allocated on
disk as their first extent is. Invariant: an extent is free, or owned by one block, write or drop.
"""

from collections.abc import Collection


class ExtentTable:
    """Which extents are free."""

    def __init__(self, num_extents: int) -> None:
        self._num_extents = num_extents
        self._next = 0  # extents from here on were never used
        self._returned: list[int] = []

    def __len__(self) -> int:
        return self._num_extents

    @property
    def num_free(self) -> int:
        """Extents that can be allocated now."""
        return len(self._returned) + self._num_extents - self._next

    @property
    def num_used(self) -> int:
        """Extents that are owned."""
        return self._num_extents - self.num_free

    def restore(self, used: Collection[int]) -> None:
        """Start from the extents that recovery found in use; all are below the table's length."""
        self._next = max(used, default=-1) + 1
        self._returned = [e for e in range(self._next - 1, -1, -1) if e not in used]

    def allocate(self) -> int:
        """Take a free extent; the caller has made sure there is one."""
        if self._returned:
            return self._returned.pop()
        assert self._next < self._num_extents, "no extent is free"
        self._next += 1
        return self._next - 1

    def free(self, extent: int) -> None:
        """Give an extent back."""
        assert extent < self._next, f"extent {extent} was never allocated"
        self._returned.append(extent)
