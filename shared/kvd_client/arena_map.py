"""A mapped arena: slot number → the memory of that slot. The same class serves kvd and engines."""

import mmap
import os

from shared.process.dumps import leave_out
from shared.types.units import align_up


class ArenaMap:
    """The slots of one arena, mapped shared and writable.

    Invariant: a memoryview handed out stays valid for as long as somebody holds it. The mapping is
    undone when this object and the last view are gone; close() only ends handing out.
    """

    def __init__(self, fd: int, slot_bytes: int, num_slots: int) -> None:
        """Map `fd`, which the caller may close afterwards.

        Raises:
            ValueError: if the file is smaller than the slots, or there are none.
            OSError: if it cannot be mapped.
        """
        size = slot_bytes * num_slots
        if size <= 0 or os.fstat(fd).st_size < size:
            raise ValueError(f"an arena of {os.fstat(fd).st_size} bytes, {size} were announced")
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        # Whole huge pages where the file has them: the kernel unmaps nothing less.
        mapped = min(align_up(size, os.fstat(fd).st_blksize), os.fstat(fd).st_size)
        mapping = mmap.mmap(fd, mapped)
        leave_out(mapping)
        self._view: memoryview | None = memoryview(mapping)

    @property
    def memory(self) -> memoryview:
        """The memory of all slots, up to the end of its last page.

        Raises:
            ValueError: the arena is closed.
        """
        if self._view is None:
            raise ValueError("the arena is closed")
        return self._view

    def slot(self, slot_id: int) -> memoryview:
        """The writable memory of one slot, `slot_bytes` long.

        Raises:
            ValueError: if there is no such slot, or the arena is closed.
        """
        if self._view is None or not 0 <= slot_id < self.num_slots:
            raise ValueError(f"no slot {slot_id} in an arena of {self.num_slots}")
        start = slot_id * self.slot_bytes
        return self._view[start : start + self.slot_bytes]

    def close(self) -> None:
        """Hand out no more slots and unmap as soon as no view is left."""
        self._view = None
