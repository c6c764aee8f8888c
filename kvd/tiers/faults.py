"""Injected failures, for tests: an argument of whatever touches the disk or shared memory.

Each named write point is passed right after the write that it names. A test enumerates `WritePoint`
and kills the process at one of them. The syncs of segments go through here, too: a test that cuts
the power keeps only what they were called for.
"""

import os
from enum import Enum
from typing import Protocol


class WritePoint(Enum):
    """Where a kill leaves something half done."""

    ARENA_FILES = "arena_files"  # the arena's files exist, its journal has no header yet
    ARENA_HEADER = "arena_header"  # the header is written, the fd store does not have it yet
    ARENA_KEPT = "arena_kept"  # created, and where the next kvd finds it
    ARENA_ADOPTED = "arena_adopted"  # its epoch is raised
    ARENA_REMOVED = "arena_removed"  # half of its files are gone
    JOURNAL_FREED = "journal_freed"  # a record is FREE, its new body is not written yet
    JOURNAL_BODY = "journal_body"  # body and checksum are written, the state is still FREE
    JOURNAL_PUT = "journal_put"
    JOURNAL_CLEARED = "journal_cleared"
    VOLUME_ID_WRITTEN = "volume_id_written"  # under another name
    VOLUME_ID_KEPT = "volume_id_kept"  # the index does not name it yet
    SEGMENT_CREATED = "segment_created"  # the file exists and has no space yet
    SEGMENT_ALLOCATED = "segment_allocated"
    SEGMENT_REMOVED = "segment_removed"
    EXTENT_WRITTEN = "extent_written"  # in the file, or the device's cache; not durable yet
    SEGMENT_SYNCED = "segment_synced"  # durable, and no index row says so yet
    INDEX_CREATED = "index_created"  # the database is there, its tables are not
    INDEX_SET_ASIDE = "index_set_aside"  # the volumes of an older schema are renamed, it is not
    INDEX_BEGUN = "index_begun"
    INDEX_ROWS = "index_rows"  # written, not committed
    INDEX_COMMITTED = "index_committed"
    CLOCK_SAVED = "clock_saved"
    SLOT_WIPED = "slot_wiped"  # a slot is zero, its journal record is not
    KEYS_DROPPED = "keys_dropped"  # keys of erased tenants are deleted; the WAL still has them
    WAL_TRUNCATED = "wal_truncated"  # now it has not


class Faults(Protocol):
    """Each method may raise OSError in place of the device, or not return at all."""

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
        """Make a file's content and size durable, or a directory's names."""
        ...

    def fdatasync(self, fd: int) -> None:
        """Make what was written into allocated space durable."""
        ...


class NoFaults:
    """The device's own failures only."""

    fsync = staticmethod(os.fsync)
    fdatasync = staticmethod(os.fdatasync)

    def before_read(self, extent: int) -> None:
        """Let the read or write happen."""

    def before_write(self, extent: int) -> None:
        """Let the read or write happen."""

    def reach(self, point: WritePoint) -> None:
        """Pass the point."""
