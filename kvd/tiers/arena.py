"""One layout's arena: its slots, which engines map, its journal, and its progress words (D2, D4).

The slots' memory is sealed against resizing where it is a memfd, so that an engine that holds its
descriptor can neither shrink it under us (SIGBUS) nor grow it. Who creates, finds and removes
arenas is kvd/tiers/arena_store.py.
"""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from kvd.tiers import page_advice
from kvd.tiers.journal import Journal
from kvd.tiers.progress import Progress
from shared.kvd_client.arena_map import ArenaMap
from shared.types.errors import StateError
from shared.types.units import format_bytes

AUTO_FRACTION = 0.25  # of the memory that is available when kvd starts
MIN_SLOTS = 2  # one to read while another is written
PREFAULT_CHUNK_BYTES = 64 << 20  # about 20 ms of the kernel's time
LEASE_ID_SHIFT = 40  # lease ids of one kvd: its epoch, then a number


class ArenaTooSmallError(StateError):
    """The DRAM tier cannot hold even a few blocks of this layout."""

    reason = "arena_too_small"


def dram_bytes(configured: int | None) -> int:
    """Return the size of the DRAM tier: as configured, or a fraction of what is free now."""
    if configured is not None:
        return configured
    return int(psutil.virtual_memory().available * AUTO_FRACTION)


def num_slots_for(arena_bytes: int, slot_bytes: int, setting: str = "dram.bytes") -> int:
    """Return how many slots fit; `setting` is the one that bounds arena_bytes.

    Raises:
        ArenaTooSmallError: fewer than MIN_SLOTS.
    """
    num_slots = arena_bytes // slot_bytes
    if num_slots < MIN_SLOTS:
        raise ArenaTooSmallError(
            f"{format_bytes(arena_bytes)} of DRAM hold {num_slots} blocks of "
            f"{format_bytes(slot_bytes)}, {MIN_SLOTS} are needed",
            f"raise {setting}",
        )
    return num_slots


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """An arena as it is.

    Attributes:
        keep: what holds it when this process ends: "fdstore", "file", "none".
        pages: "hugetlb", "thp" (seen in smaps), "small"; "": not allocated yet.
        epoch: one more each time it is taken over.
        num_adopted: blocks taken over at this start.
        physical_bytes: memory that is allocated for its slots.
    """

    arena_id: str
    keep: str
    pages: str
    epoch: int
    num_adopted: int
    is_prefaulted: bool
    physical_bytes: int


class Arena:
    """The memory of one layout.

    Attributes:
        arena_id: random, hex; a client that finds the same one again keeps its mapping.
        fd: descriptor of the slots: what engines get.
        slots: kvd's own mapping.
        num_bytes: memory that the slots take once they are all allocated.
        journal: record of what the slots hold, see kvd/tiers/journal.py.
        progress: progress words of loads, see kvd/tiers/progress.py.
        epoch: how many kvds have used the arena, from a random start.
        pages: what the memory is made of: "hugetlb"; once it is allocated, "thp" where the kernel
            says that it has transparent huge pages, else "small"; "" while nobody has looked.
        closing: once it is set, a running prefault returns after its current chunk.
    """

    def __init__(
        self,
        fd: int,
        slots: ArenaMap,
        journal: Journal,
        progress: Progress,
        epoch: int,
        pages: str,
        remove: Callable[[], None],
    ) -> None:
        """Take over `fd`. `remove` takes the arena away from where the next kvd would find it."""
        self.arena_id = journal.header.arena_id.hex()
        self.fd = fd
        self.slots = slots
        self.num_bytes = slots.memory.nbytes
        self.journal = journal
        self.progress = progress
        self.epoch = epoch
        self.pages = pages
        self._remove = remove
        self.closing = threading.Event()

    @property
    def first_lease_id(self) -> int:
        """Lease ids from here on were never given out by an earlier kvd of this arena."""
        return self.epoch << LEASE_ID_SHIFT

    def physical_bytes(self) -> int:
        """Return the bytes of memory that the slots take now."""
        return os.fstat(self.fd).st_blocks * 512  # whatever the page size is

    def prefault(self) -> int:
        """Allocate every page, so that no copy waits for the kernel to zero one; takes seconds.

        Allocation leaves contents alone: it may run while engines already write.

        Returns:
            Bytes allocated; fewer than the arena if the machine has no more memory to give.
        """
        memory = self.slots.memory
        for start in range(0, memory.nbytes, PREFAULT_CHUNK_BYTES):
            if self.closing.is_set():
                return start
            if not self._allocate(memory, start):
                return start
        if not self.pages:
            with contextlib.suppress(OSError):
                self.pages = "thp" if page_advice.huge_bytes(memory) else "small"
        return memory.nbytes

    def close(self, *, keep: bool = False) -> None:
        """Close descriptors and mappings; engines that map the slots keep that memory alive.

        Args:
            keep: leave the arena for the next kvd, where it can be left at all.
        """
        self.closing.set()
        if not keep:
            self._remove()
        self.slots.close()
        self.journal.close()
        self.progress.close_all()
        os.close(self.fd)

    def _allocate(self, memory: memoryview, start: int) -> bool:
        """Allocate one chunk; False if there is no memory for it."""
        chunk = memory[start : start + PREFAULT_CHUNK_BYTES]
        try:
            page_advice.populate(chunk)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return False
        else:
            return True
        try:  # an older kernel; this way gives small pages
            os.posix_fallocate(self.fd, start, chunk.nbytes)
        except OSError:
            return False
        return True
