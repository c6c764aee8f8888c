"""Fault injection for tests: an argument of every class that writes to disk or shared memory.

Code reaches a named write point right after the write that it names. A test enumerates
`WritePoint` and kills the process at one of them. The syncs of segments go through here, too: a
test that simulates a power cut keeps only the data that was synced.
"""

import os
from enum import Enum
from typing import Protocol


class WritePoint(Enum):
    """Points at which a kill leaves a change half done."""

    ARENA_FILES = "arena_files"  # the arena's files exist, its journal has no header yet
    ARENA_HEADER = "arena_header"  # the header is written, the fd store does not have it yet
    ARENA_KEPT = "arena_kept"  # the arena is where the next kvd finds it
    ARENA_ADOPTED = "arena_adopted"  # the arena's epoch is raised
    ARENA_REMOVED = "arena_removed"  # one of the arena's two files is removed
    JOURNAL_FREED = "journal_freed"  # a record is FREE, its new body is not written yet
    JOURNAL_BODY = "journal_body"  # body and checksum are written, the state is still FREE
    JOURNAL_PUT = "journal_put"
    JOURNAL_CLEARED = "journal_cleared"
    VOLUME_ID_WRITTEN = "volume_id_written"  # the file still has its temporary name
    VOLUME_ID_KEPT = "volume_id_kept"  # the file has its name, the index does not name the id yet
    SEGMENT_CREATED = "segment_created"  # the file exists, no space is allocated yet
    SEGMENT_ALLOCATED = "segment_allocated"
    SEGMENT_REMOVED = "segment_removed"
    EXTENT_WRITTEN = "extent_written"  # in the page cache or the device's cache, not durable yet
    SEGMENT_SYNCED = "segment_synced"  # the extent is durable, the index has no row of it yet
    INDEX_CREATED = "index_created"  # the database exists, its tables do not
    INDEX_SET_ASIDE = "index_set_aside"  # an older index's volumes are renamed, the index is not
    INDEX_BEGUN = "index_begun"
    INDEX_ROWS = "index_rows"  # rows are written, not committed
    INDEX_COMMITTED = "index_committed"
    CLOCK_SAVED = "clock_saved"
    SLOT_WIPED = "slot_wiped"  # a slot is zeroed, its journal record is not
    KEYS_DROPPED = "keys_dropped"  # keys of erased tenants are deleted, the WAL still has them
    WAL_TRUNCATED = "wal_truncated"  # the WAL has them no more


class Faults(Protocol):
    """Hooks of the tiers. Each may raise OSError as the device would, or never return."""

    def before_read(self, extent: int) -> None:
        """Run before an extent is read."""
        ...

    def before_write(self, extent: int) -> None:
        """Run before an extent is written."""
        ...

    def reach(self, point: WritePoint) -> None:
        """Run when a write point is reached."""
        ...

    def fsync(self, fd: int) -> None:
        """Make a file's contents and size durable, or a directory's names."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Make data durable that was written into allocated space."""
        ...


class NoFaults:
    """No injected faults: only the device's own failures occur."""

    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)

    def before_read(self, extent: int) -> None:
        """Do nothing."""

    def before_write(self, extent: int) -> None:
        """Do nothing."""

    def reach(self, point: WritePoint) -> None:
        """Do nothing."""
