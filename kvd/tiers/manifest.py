"""The index of everything stored: layouts, sessions, blocks, tenant salts, the clock.

SQLite in WAL mode.

Invariants:
1. A block's row is written only after its data is durable, and removed (and committed) before its
   extent is used again. The cache engine orders it so; this module keeps the order it is given.
2. Rows are written by one thread, in groups: one commit, and one sync, for all that is waiting.
3. A database that is not one is moved aside, never deleted, and kvd starts empty. One written by a
   newer release is left alone, and the start is refused.

A commit that fails (disk full) is tried again until it succeeds; loads and stores go on meanwhile.
"""

import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kvd.core.records import BlockRecord, SessionRecord, Span
from kvd.tiers.batch_worker import BatchWorker
from shared.block_key import KEY_BYTES, TOKEN_BYTES
from shared.errors import ConfigError
from shared.log import get_logger
from shared.session_key import SessionKey

SCHEMA_VERSION = 1
MAX_BATCH = 4096  # rows in one commit
MAX_QUEUED = (
    200_000  # rows waiting for a disk that does not take them; beyond, records are not kept
)
RETRY_S = 1.0  # between two attempts at a commit
BUSY_S = 5.0  # SQLite's wait for somebody's lock (a backup, an operator's sqlite3)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS layouts (
    fingerprint TEXT PRIMARY KEY,
    message BLOB NOT NULL,                  -- kvd.v1.KVLayout, serialised
    extents_per_segment INTEGER NOT NULL    -- where an extent lies: fixed for the volume's life
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS salts (tenant TEXT PRIMARY KEY, salt BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks (
    layout TEXT NOT NULL, key BLOB NOT NULL,
    token_ids BLOB NOT NULL,                -- little-endian uint32
    extent INTEGER NOT NULL,
    checksums BLOB NOT NULL,                -- little-endian uint64, one per layer slice
    PRIMARY KEY (layout, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    layout TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL, session_id TEXT NOT NULL,
    spans BLOB NOT NULL,                    -- _SPAN, one after the other
    last_access_ns INTEGER NOT NULL,        -- of kvd's clock
    ttl_ns INTEGER,                         -- NULL: the default
    pinned INTEGER NOT NULL, ended INTEGER NOT NULL,
    PRIMARY KEY (layout, tenant, model, session_id)
) WITHOUT ROWID;
"""

# 0: block key (16), 16: start (u32), 20: num_tokens (u32), 24: tokens digest (16), 40: chain (16)
_SPAN = struct.Struct(f"<{KEY_BYTES}sII{KEY_BYTES}s{KEY_BYTES}s")

Value: TypeAlias = str | bytes | int | None

log = get_logger(__name__)


class NewerManifestError(ConfigError):
    """The state directory was written by a newer release."""

    reason = "newer_manifest"


class UnusableManifestError(ConfigError):
    """The index cannot be opened, although it may be fine."""

    reason = "unusable_manifest"


@dataclass(frozen=True)
class LayoutRow:
    """A layout that has a volume."""

    fingerprint: str
    message: bytes
    extents_per_segment: int


@dataclass(frozen=True)
class Row:
    """One statement to commit.

    Attributes:
        sql: the statement.
        values: its parameters.
        committed: called after the commit, from the writer thread; or when the row is left out.
        optional: may be left out when too much is waiting; its loss is a miss after the next start.
    """

    sql: str
    values: tuple[Value, ...]
    committed: Callable[[], None] | None = None
    optional: bool = False


class Manifest:
    """The open index. Reading is for the start; afterwards rows are only put."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None  # the writer thread's
        self._reader: sqlite3.Connection | None = None  # the caller's: no transaction to share
        self._closing = threading.Event()
        self._writer: BatchWorker[Row] = BatchWorker("kvd-manifest", self._commit, MAX_BATCH)
        self.num_left_out = 0  # optional rows given up

    # --------------------------------------------------------------------------------- opening

    def open(self) -> None:
        """Open or create the database; move a damaged one aside.

        Raises:
            NewerManifestError: the schema is newer than this release.
            UnusableManifestError: the file system does not let us.
        """
        try:
            try:
                self._db = self._connect()
            except sqlite3.DatabaseError as error:
                if (
                    type(error) is not sqlite3.DatabaseError
                ):  # locked, no access, disk full: not damage
                    raise
                moved = self._move_aside()
                log.error("manifest_corrupt", error=str(error), moved_to=str(moved))  # noqa: TRY400
                self._db = self._connect()
        except (sqlite3.Error, OSError) as error:
            raise UnusableManifestError(
                f"cannot open the index {self._path} ({error})",
                "make state_dir a writable directory with free space",
            ) from error
        self._reader = sqlite3.connect(self._path, timeout=BUSY_S)
        self._writer.start()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self._path, timeout=BUSY_S, check_same_thread=False, isolation_level=None
        )
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)  # noqa: TRY301
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise NewerManifestError(  # noqa: TRY301
                    f"{self._path} has schema {version}, this release knows {SCHEMA_VERSION}",
                    "start the release that wrote it, or name another state_dir",
                )
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    def _move_aside(self) -> Path:
        """Rename the database and its companions out of the way; returns the new name."""
        number = 1
        while (moved := self._path.with_name(f"{self._path.name}.corrupt-{number}")).exists():
            number += 1
        for suffix in ("-wal", "-shm", ""):
            companion = self._path.with_name(self._path.name + suffix)
            if companion.exists():
                companion.rename(moved.with_name(moved.name + suffix))
        return moved

    # --------------------------------------------------------------------------------- reading

    def layouts(self) -> list[LayoutRow]:
        """Every layout that has a volume."""
        rows = self._query("SELECT fingerprint, message, extents_per_segment FROM layouts")
        return [LayoutRow(*row) for row in rows]

    def salts(self) -> dict[str, bytes]:
        """Tenant → secret salt of its block keys."""
        return dict(self._query("SELECT tenant, salt FROM salts"))

    def meta(self, name: str) -> str:
        """A value put by put_meta, or ""."""
        rows = list(self._query("SELECT value FROM meta WHERE name = ?", name))
        return str(rows[0][0]) if rows else ""

    def blocks(self, layout: str) -> Iterator[BlockRecord]:
        """Blocks of a layout; a row that cannot be decoded is left out."""
        sql = "SELECT key, token_ids, extent, checksums FROM blocks WHERE layout = ?"
        for key, token_ids, extent, checksums in self._query(sql, layout):
            if len(token_ids) % TOKEN_BYTES or len(checksums) % 8:
                continue
            yield BlockRecord(
                key=key,
                token_ids=token_ids,
                num_tokens=len(token_ids) // TOKEN_BYTES,
                extent=extent,
                checksums=struct.unpack(f"<{len(checksums) // 8}Q", checksums),
            )

    def sessions(self, layout: str) -> Iterator[SessionRecord]:
        """Sessions of a layout, least recently used first; undecodable rows are left out."""
        sql = (
            "SELECT tenant, model, session_id, spans, last_access_ns, ttl_ns, pinned, ended "
            "FROM sessions WHERE layout = ? ORDER BY last_access_ns"
        )
        for tenant, model, session_id, spans, last_access_ns, ttl_ns, pinned, ended in self._query(
            sql, layout
        ):
            if len(spans) % _SPAN.size == 0:
                yield SessionRecord(
                    key=SessionKey(tenant, model, session_id),
                    spans=tuple(Span(*fields) for fields in _SPAN.iter_unpack(spans)),
                    last_access_ns=last_access_ns,
                    ttl_ns=ttl_ns,
                    pinned=bool(pinned),
                    ended=bool(ended),
                )

    def _query(self, sql: str, *values: Value) -> Iterator[tuple[Any, ...]]:
        assert self._reader is not None, "the manifest is not open"  # noqa: S101
        return iter(self._reader.execute(sql, values))

    # --------------------------------------------------------------------------------- writing

    def put_layout(self, row: LayoutRow) -> None:
        """Add a layout."""
        values = (row.fingerprint, row.message, row.extents_per_segment)
        self._put(Row("INSERT OR REPLACE INTO layouts VALUES (?, ?, ?)", values))

    def put_salt(self, tenant: str, salt: bytes) -> None:
        """Keep a tenant's salt."""
        self._put(Row("INSERT OR REPLACE INTO salts VALUES (?, ?)", (tenant, salt)))

    def put_meta(self, name: str, value: str) -> None:
        """Keep a value."""
        self._put(Row("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value)))

    def put_block(self, layout: str, block: BlockRecord, committed: Callable[[], None]) -> None:
        """Keep a block's row; its data is durable. `committed`: see Row."""
        checksums = struct.pack(f"<{len(block.checksums)}Q", *block.checksums)
        values = (layout, block.key, block.token_ids, block.extent, checksums)
        sql = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)"
        self._put(Row(sql, values, committed, optional=True))

    def drop_block(self, layout: str, key: bytes, committed: Callable[[], None]) -> None:
        """Remove a block's row; the writer thread calls `committed` once that is durable."""
        sql = "DELETE FROM blocks WHERE layout = ? AND key = ?"
        self._put(Row(sql, (layout, key), committed))

    def put_session(self, layout: str, session: SessionRecord) -> None:
        """Keep a session's row, in place of an earlier one."""
        spans = b"".join(
            _SPAN.pack(s.block_key, s.start, s.num_tokens, s.tokens_digest, s.chain)
            for s in session.spans
        )
        state = (session.last_access_ns, session.ttl_ns, session.pinned, session.ended)
        sql = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self._put(Row(sql, (layout, *session.key, spans, *state), optional=True))

    def drop_session(self, layout: str, key: SessionKey) -> None:
        """Remove a session's row."""
        sql = (
            "DELETE FROM sessions WHERE layout = ? AND tenant = ? AND model = ? AND session_id = ?"
        )
        self._put(Row(sql, (layout, *key)))

    def when_committed(self, committed: Callable[[], None]) -> None:
        """Have the writer thread call `committed` once all that was put before is durable."""
        self._put(Row("SELECT 1", (), committed))

    def _put(self, row: Row) -> None:
        if row.optional and len(self._writer) >= MAX_QUEUED:
            self.num_left_out += 1
            if row.committed is not None:
                row.committed()
            return
        self._writer.put(row)

    def close(self) -> None:
        """Commit what is waiting, if the disk takes it, and close."""
        self._closing.set()
        self._writer.close()
        for db in (self._reader, self._db):
            if db is not None:
                db.close()
        self._db = self._reader = None

    def _commit(self, batch: list[Row]) -> None:
        """Commit one group, trying again for as long as the file system refuses (writer thread)."""
        assert self._db is not None, "the manifest is not open"  # noqa: S101
        failed = False
        while True:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for row in batch:
                    self._db.execute(row.sql, row.values)
                self._db.execute("COMMIT")
                break
            except sqlite3.Error as error:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                if not failed:
                    log.error("manifest_commit_failed", error=str(error), rows=len(batch))  # noqa: TRY400
                failed = True
                if self._closing.wait(RETRY_S):
                    return
        if failed:
            log.info("manifest_commit_recovered", rows=len(batch))
        for row in batch:
            if row.committed is not None:
                row.committed()
