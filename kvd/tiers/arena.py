"""The arena of one layout: slots that engines map, a journal and progress words (D2, D4).

An engine holds a descriptor of the slots. Where their memory is a memfd it is sealed against
resizing, so that the engine can neither shrink it under kvd (SIGBUS) nor grow it.
kvd/tiers/arena_store.py creates, finds and removes arenas.
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
LEASE_ID_SHIFT = 40  # a lease id is epoch << 40 | number


class ArenaTooSmallError(StateError):
    """The DRAM tier cannot hold even a few blocks of this layout."""

    reason = "arena_too_small"


def dram_bytes(configured: int | None) -> int:
    """Return the size of the DRAM tier: as configured, or a fraction of the memory free now."""
    if configured is not None:
        return configured
    return int(psutil.virtual_memory().available * AUTO_FRACTION)


def num_slots_for(arena_bytes: int, slot_bytes: int, setting: str = "dram.bytes") -> int:
    """Return how many slots fit into an arena.

    Args:
        arena_bytes: size of the arena.
        slot_bytes: size of one slot.
        setting: name of the setting that bounds `arena_bytes`, for the error message.

    Raises:
        ArenaTooSmallError: fewer than MIN_SLOTS slots fit.
    """
    num_slots = arena_bytes // slot_bytes
    if num_slots < MIN_SLOTS:
        raise ArenaTooSmallError(
            f"{format_bytes(arena_bytes)} of DRAM hold {num_slots} blocks of "
            f"{format_bytes(slot_bytes)}, but at least {MIN_SLOTS} are needed",
            f"raise {setting}",
        )
    return num_slots


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """The present state of an arena, for operators.

    Attributes:
        keep: what holds the arena when this process ends: "fdstore", "file" or "none".
        pages: "hugetlb", "thp" (seen in smaps) or "small"; "": not allocated yet.
        epoch: raised by one each time that a kvd takes the arena over.
        num_adopted: blocks taken over at this start.
        physical_bytes: memory that is allocated for the slots.
    """

    arena_id: str
    keep: str
    pages: str
    epoch: int
    num_adopted: int
    is_prefaulted: bool
    physical_bytes: int


class Arena:
    """The DRAM of one layout.

    Attributes:
        arena_id: random id, hex; a client that finds the same id again keeps its mapping.
        fd: descriptor of the slots, which engines receive.
        slots: kvd's own mapping of the slots.
        num_bytes: memory that the slots take once all of them are allocated.
        journal: record of what the slots hold, see kvd/tiers/journal.py.
        progress: progress words of loads, see kvd/tiers/progress.py.
        epoch: number of kvd processes that have used the arena, counted from a random start.
        pages: kind of the memory's pages. "hugetlb"; or, once it is allocated, "thp" where the
            kernel reports transparent huge pages, else "small"; "" until that is checked.
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
        """Take ownership of `fd`.

        Args:
            fd: descriptor of the slots.
            slots: mapping of the slots.
            journal: the arena's journal.
            progress: the arena's progress words.
            epoch: this kvd's epoch.
            pages: see the class.
            remove: removes the arena from the place where the next kvd would find it.
        """
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
        """The first lease id that no earlier kvd of this arena can have used."""
        return self.epoch << LEASE_ID_SHIFT

    def physical_bytes(self) -> int:
        """Return the bytes of memory that are allocated for the slots now."""
        return os.fstat(self.fd).st_blocks * 512  # st_blocks is in 512 bytes, for any page size

    def prefault(self) -> int:
        """Allocate every page, so that no copy waits for the kernel to zero one; takes seconds.

        Allocation does not change contents, so this may run while engines already write.

        Returns:
            Bytes allocated. They are fewer than the arena's if the machine has no more memory.
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
        """Close descriptors and mappings.

        The slots' memory lives on while an engine maps it.

        Args:
            keep: leave the arena for the next kvd, if its backing can keep it.
        """
        self.closing.set()
        if not keep:
            self._remove()
        self.slots.close()
        self.journal.close()
        self.progress.close_all()
        os.close(self.fd)

    def _allocate(self, memory: memoryview, start: int) -> bool:
        """Allocate one chunk; return False if there is no memory for it."""
        chunk = memory[start : start + PREFAULT_CHUNK_BYTES]
        try:
            page_advice.populate(chunk)
        except OSError as error:
            if error.errno != errno.EINVAL:
                return False
        else:
            return True
        try:  # EINVAL: a kernel without MADV_POPULATE_WRITE. fallocate gives small pages.
            os.posix_fallocate(self.fd, start, chunk.nbytes)
        except OSError:
            return False
        return True
