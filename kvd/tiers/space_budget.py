"""The SSD tier's space: what all volumes together may allocate, and what the file system has left.

Invariant: volumes ask before they allocate a segment, so their sum never exceeds the budget, and a
reserve of the file system stays free for the index and for others.
"""

import os
import threading
from pathlib import Path


class SpaceBudget:
    """Shared by volumes; for any thread.

    Args:
        total_bytes: of allocated segments; None: only the file system is the limit.
        reserve_bytes: of the file system, to be left free.
        directory: on that file system; it may not exist yet.
    """

    def __init__(self, total_bytes: int | None, reserve_bytes: int, directory: Path) -> None:
        self.total_bytes = total_bytes
        self._reserve_bytes = reserve_bytes
        self._directory = directory
        self._allocated_bytes = 0
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        """Segments of all volumes."""
        return self._allocated_bytes

    def free_bytes(self) -> int:
        """What could still be allocated now; negative when the budget was made smaller."""
        free = max(0, self._file_system_bytes() - self._reserve_bytes)
        if self.total_bytes is None:
            return free
        return min(free, self.total_bytes - self._allocated_bytes)

    def reserve(self, least: int, wanted: int, unit: int) -> int:
        """Take between `least` and `wanted` bytes for a segment.

        Returns:
            Bytes taken: whole units, or 0 if not even `least` is left.
        """
        with self._lock:
            granted = min(wanted, self.free_bytes() // unit * unit)
            if granted < least:
                return 0
            self._allocated_bytes += granted
            return granted

    def add_existing(self, num_bytes: int) -> None:
        """Count a segment that was found."""
        with self._lock:
            self._allocated_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Space that was not allocated after all, or of a segment that is removed."""
        with self._lock:
            self._allocated_bytes -= num_bytes

    def _file_system_bytes(self) -> int:
        paths = (self._directory, *self._directory.parents)
        try:
            status = os.statvfs(next(path for path in paths if path.exists()))
        except OSError:  # a disk that fails, or that we may not look at, takes nothing
            return 0
        return status.f_bavail * status.f_frsize
