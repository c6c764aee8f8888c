"""The DRAM tier's memory: one sealed memfd of fixed-size slots per layout (D2).

The file is sealed against resizing, so that an engine that holds its descriptor can neither shrink
it under us (SIGBUS) nor grow it. Its pages are allocated in the background, a chunk at a time.
"""

import fcntl
import os
import threading

import psutil

from shared.arena_map import ArenaMap
from shared.errors import StateError
from shared.units import SECTOR_BYTES, align_up, format_bytes

AUTO_FRACTION = 0.25  # of the memory that is available when kvd starts
MIN_SLOTS = 2  # one to read while another is written
PREFAULT_CHUNK_BYTES = 64 << 20  # about 20 ms of the kernel's time


class ArenaTooSmallError(StateError):
    """The DRAM tier cannot hold even a few blocks of this layout."""

    reason = "arena_too_small"


def dram_bytes(configured: int | None) -> int:
    """Size of an arena: as configured, or a fraction of what is available now."""
    if configured is not None:
        return configured
    return int(psutil.virtual_memory().available * AUTO_FRACTION)


def num_slots_for(arena_bytes: int, slot_bytes: int) -> int:
    """How many slots fit.

    Raises:
        ArenaTooSmallError: fewer than MIN_SLOTS.
    """
    num_slots = arena_bytes // slot_bytes
    if num_slots < MIN_SLOTS:
        raise ArenaTooSmallError(
            f"{format_bytes(arena_bytes)} of DRAM hold {num_slots} blocks of "
            f"{format_bytes(slot_bytes)}, {MIN_SLOTS} are needed",
            "raise dram.bytes",
        )
    return num_slots


class Arena:
    """One layout's arena: the descriptor that engines get, and kvd's own mapping."""

    def __init__(self, arena_id: str, fd: int, slots: ArenaMap) -> None:
        self.arena_id = arena_id
        self.fd = fd
        self.slots = slots
        self._closing = threading.Event()

    def prefault(self) -> int:
        """Allocate every page, so that no copy waits for the kernel to zero one; takes seconds.

        Allocation leaves contents alone: it may run while engines already write.

        Returns:
            Bytes allocated; fewer than the arena if the machine has no more memory to give.
        """
        size = align_up(self.slots.slot_bytes * self.slots.num_slots, SECTOR_BYTES)
        for start in range(0, size, PREFAULT_CHUNK_BYTES):
            if self._closing.is_set():
                return start
            try:
                os.posix_fallocate(self.fd, start, min(PREFAULT_CHUNK_BYTES, size - start))
            except OSError:
                return start
        return size

    def stop_prefault(self) -> None:
        """Let a running prefault return after its current chunk."""
        self._closing.set()

    def close(self) -> None:
        """Give up the descriptor and the mapping; engines that map it keep the memory alive."""
        self.stop_prefault()
        self.slots.close()
        os.close(self.fd)


def create_arena(arena_id: str, slot_bytes: int, num_slots: int) -> Arena:
    """Create and seal the memfd. It takes memory only as pages are used or prefaulted."""
    fd = os.memfd_create(f"kvd-{arena_id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, align_up(slot_bytes * num_slots, SECTOR_BYTES))
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return Arena(arena_id, fd, ArenaMap(fd, slot_bytes, num_slots))
    except BaseException:
        os.close(fd)
        raise
