"""The space budget of the SSD tier, which all volumes share.

A volume reserves space before it allocates it. After the budget was reduced, the volumes may have
more than it allows. Then none may allocate more, and each has to give back the same share of what
it had when the last volume was opened, however quickly the others give theirs.
"""

import os
import threading
from pathlib import Path

UNBOUNDED = 1 << 60  # bytes: more than any disk has


class SpaceBudget:
    """The space that all volumes together may allocate. Any thread may call any method.

    Args:
        total_bytes: most bytes of allocated segments; None: only the file system is the limit.
        reserve_bytes: bytes of the file system that stay free.
        directory: directory on that file system; it may not exist yet.
    """

    def __init__(self, total_bytes: int | None, reserve_bytes: int, directory: Path) -> None:
        self.total_bytes = total_bytes
        self._reserve_bytes = reserve_bytes
        self._directory = directory
        self._allocated: dict[Path, int] = {}  # bytes by volume
        self._most: dict[Path, int] = {}  # bytes that each volume may have at most
        self._claims: dict[Path, int] = {}  # what each had of that when the last one was opened
        self._lock = threading.Lock()

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated for the segments of all volumes."""
        return sum(tuple(self._allocated.values()))

    def free_bytes(self) -> int:
        """Return the bytes that can still be allocated; negative after the budget was reduced."""
        free = max(0, self._file_system_bytes() - self._reserve_bytes)
        if self.total_bytes is None:
            return free
        return min(free, self.total_bytes - self.allocated_bytes)

    def free_bytes_for(self, volume: Path) -> int:
        """Return the bytes that a volume may still allocate; negative: it has to give them back.

        After the budget was reduced, each volume keeps the same share of what it had.
        """
        free = self.free_bytes()
        if free >= 0 or self.total_bytes is None:
            return free
        with self._lock:
            share = self.total_bytes * self._claims[volume] // max(1, sum(self._claims.values()))
            return min(0, max(free, share - self._allocated[volume]))

    def reserve(self, volume: Path, least: int, wanted: int, unit: int) -> int:
        """Reserve between `least` and `wanted` bytes for a segment of a volume.

        Returns:
            Bytes reserved, in multiples of `unit`; 0 if less than `least` is left.
        """
        with self._lock:
            granted = min(wanted, self.free_bytes() // unit * unit)
            if granted < least:
                return 0
            self._allocated[volume] += granted
            return granted

    def open(self, volume: Path, num_bytes: int, most_bytes: int | None) -> None:
        """Add a volume, with the bytes of its segments.

        Args:
            volume: the volume's directory.
            num_bytes: bytes of the segments that exist.
            most_bytes: to how many bytes it may grow, in no case more; None: only the budget says.
        """
        with self._lock:
            self._allocated[volume] = num_bytes
            self._most[volume] = UNBOUNDED if most_bytes is None else most_bytes
            self._claims = {name: min(n, self._most[name]) for name, n in self._allocated.items()}

    def release(self, volume: Path, num_bytes: int) -> None:
        """Give back the space of a removed segment, or of an allocation that failed."""
        with self._lock:
            self._allocated[volume] -= num_bytes

    def close(self, volume: Path) -> None:
        """Remove a volume, with all of its space."""
        with self._lock:
            for table in (self._allocated, self._most, self._claims):
                table.pop(volume, None)

    def _file_system_bytes(self) -> int:
        paths = (self._directory, *self._directory.parents)
        try:
            status = os.statvfs(next(path for path in paths if path.exists()))
        except OSError:  # a disk that fails, or may not be accessed, has no space for us
            return 0
        return status.f_bavail * status.f_frsize
