"""The index of everything stored: layouts, sessions, blocks, tenants' salts and keys, the clock.

Invariants:
1. A block's row is written only after its data is durable, and removed (and committed) before its
   extent is used again. The cache engine orders it so; this module keeps the order it is given.
2. Rows are written by one thread, in groups: one commit, and one sync, for all that is waiting.

A commit that fails (disk full) is tried again until it succeeds; loads and stores are served
meanwhile. What may wait here is bounded in bytes: who puts rows looks at `room_bytes` first. Rows
of layouts, tenants and the clock are few, and are put without.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from kvd.core.records.entries import BlockRecord, IndexEntries, SessionRecord
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.index_database import BUSY_S, open_database
from kvd.tiers.index_rows import read_blocks, read_sessions
from kvd.tiers.io_threads import BatchWorker
from shared.process.log import get_logger
from shared.types.block_key import SALT_BYTES
from shared.types.kv_layout import KVLayout
from shared.types.session_key import SessionKey

MAX_BATCH = 4096  # rows in one commit
GATHER_S = 0.01  # between commits: each syncs the disk, and writes of data wait for that
MAX_QUEUED_BYTES = 8 << 20  # of rows that are not committed
ROW_BYTES = 256  # of a queued row, beside what its values hold
RETRY_S = 1.0  # between two attempts at a commit

SET_ASIDE = ".set-aside-"  # between a fingerprint and a number: of rows and files that wait
_VOLUME_ID = "volume_id:"  # before a layout's number: name of a value

PUT_BLOCK = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)"
PUT_SESSION = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_DROP_BESIDE = (
    "DELETE FROM uses WHERE layout = ? AND tenant = ? AND session_id = ?",
    "DELETE FROM retentions WHERE layout = ? AND tenant = ? AND session_id = ?",
)

Value: TypeAlias = str | bytes | int | None

log = get_logger(__name__)


@dataclass(frozen=True)
class LayoutRow:
    """A layout that has a volume.

    Attributes:
        fingerprint: the layout's fingerprint.
        message: kvd.v1.KVLayout, serialised; b"": what the index has is damaged.
        extents_per_segment: number of extents in a segment of its volume; 0: the index is damaged.
        volume_id: id of its volume, see kvd/tiers/volume_identity.py; "": the volume has none yet.
    """

    fingerprint: str
    message: bytes
    extents_per_segment: int
    volume_id: str = ""


class Row(NamedTuple):
    """One statement to commit.

    Attributes:
        sql: the statement.
        values: parameters of the statement.
        committed: called after the commit, from the writer thread.
        point: reached after the commit.
        purges: what it removed is to be in no file of the database any more.
        drops_beside: whether its first values name a session, of which what was put beside its row
            goes in the same commit: after a kill an older use must not stand for a newer one.
    """

    sql: str
    values: tuple[Value, ...]
    committed: Callable[[], object] | None = None
    point: WritePoint | None = None
    purges: bool = False
    drops_beside: bool = False

    @property
    def num_bytes(self) -> int:
        """About what it occupies while it waits."""
        return ROW_BYTES + sum(len(v) for v in self.values if isinstance(v, (str, bytes)))


class Manifest:
    """The open index. Reading is for the start; afterwards rows are only put.

    Args:
        path: where the database is.
        volumes: directory of the volumes, which is set aside together with an older index.
        faults: faults that tests inject, see kvd/tiers/faults.py.
    """

    def __init__(self, path: Path, volumes: Path, faults: Faults) -> None:
        self._path = path
        self._volumes = volumes
        self._faults = faults
        self._db: sqlite3.Connection | None = None  # the writer thread's
        self._reader: sqlite3.Connection | None = None  # the caller's: no transaction to share
        self._layout_ids: dict[str, int] = {}
        self._closing = threading.Event()
        self._writer: BatchWorker[Row] = BatchWorker(
            "kvd-manifest", self._commit, MAX_BATCH, GATHER_S
        )
        self._put_bytes = 0  # of all rows so far; counted where they are put
        self._committed_bytes = 0  # of these; counted by the writer's thread

    def open(self) -> None:
        """Open or create the database; see open_database.

        Raises:
            NewerManifestError: the schema is newer than this release.
            UnusableManifestError: the file system does not let us.
        """
        self._db = open_database(self._path, self._volumes, self._faults)
        self._reader = sqlite3.connect(self._path, timeout=BUSY_S)
        self._reader.text_factory = _decoded
        self._layout_ids = dict(self._query("SELECT fingerprint, id FROM layouts"))
        self._writer.start()

    # --------------------------------------------------------------------------------- reading

    def layouts(self) -> list[LayoutRow]:
        """Return every layout that has a volume, but those that are set aside."""
        rows = self._query(
            "SELECT fingerprint, iif(typeof(message) = 'blob', message, x''), "
            "iif(typeof(extents_per_segment) = 'integer', max(extents_per_segment, 0), 0), "
            "coalesce(value, '') FROM layouts LEFT JOIN meta ON name = ? || id "
            "WHERE instr(fingerprint, ?) = 0",
            *(_VOLUME_ID, SET_ASIDE),
        )
        return [LayoutRow(*row) for row in rows]

    def has_blocks(self, layout: str | None = None) -> bool:
        """Whether there is a row of a block: of a layout, by its fingerprint, or of any."""
        if layout is None:
            return bool(list(self._query("SELECT 1 FROM blocks LIMIT 1")))
        sql = "SELECT 1 FROM blocks WHERE layout = ? LIMIT 1"
        return bool(list(self._query(sql, self._layout_ids[layout])))

    def salts(self) -> dict[str, bytes]:
        """Return the secret salt of each tenant's block keys."""
        sql = "SELECT tenant, salt FROM salts WHERE typeof(salt) = 'blob' AND length(salt) = ?"
        return dict(self._query(sql, SALT_BYTES))

    def tenant_keys(self) -> dict[str, bytes]:
        """Return each tenant's wrapped secret; see kvd/encryption/keyring.py."""
        sql = "SELECT tenant, wrapped FROM tenant_keys WHERE typeof(wrapped) = 'blob'"
        return dict(self._query(sql))

    def meta(self, name: str) -> str:
        """Return a value put by put_meta, or ""."""
        rows = list(self._query("SELECT value FROM meta WHERE name = ?", name))
        return str(rows[0][0]) if rows else ""

    def rows(self, layout: KVLayout) -> IndexEntries:
        """Return blocks and sessions of a layout, in any order; sessions are read when asked for.

        Rows that cannot be decoded are left out.

        Raises:
            ValueError: the layout is not in the index (any more: its row may be damaged).
        """
        assert self._reader is not None, "the manifest is not open"  # noqa: S101
        layout_id = self._layout_ids.get(layout.fingerprint)
        if layout_id is None:
            raise ValueError(f"layout {layout.fingerprint} is not in the index")
        keys, extents, block_tokens = read_blocks(self._reader, layout_id)
        sessions = read_sessions(self._reader, layout_id, layout.model)
        return IndexEntries(sessions, keys, extents, block_tokens)  # type: ignore[arg-type]

    def _query(self, sql: str, *values: Value) -> Iterator[tuple[Any, ...]]:
        assert self._reader is not None, "the manifest is not open"  # noqa: S101
        return iter(self._reader.execute(sql, values))

    # --------------------------------------------------------------------------------- writing

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows that are not committed yet."""
        return self._put_bytes - self._committed_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes of rows that may be put now; a row may go a little beyond them."""
        return max(0, MAX_QUEUED_BYTES - self.queued_bytes)

    def put_layout(self, row: LayoutRow) -> None:
        """Add a layout; rows of its blocks and sessions may follow."""
        number = max(self._layout_ids.values(), default=0) + 1
        number = self._layout_ids.setdefault(row.fingerprint, number)
        values = (number, row.fingerprint, row.message, row.extents_per_segment)
        self._put(Row("INSERT OR REPLACE INTO layouts VALUES (?, ?, ?, ?)", values))
        if row.volume_id:
            meta = (f"{_VOLUME_ID}{number}", row.volume_id)
            self._put(Row("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta))

    def drop_layout(self, fingerprint: str) -> None:
        """Remove a layout, and any rows that name it."""
        number = self._layout_ids.pop(fingerprint)
        for sql in (
            "DELETE FROM sessions WHERE layout = ?",
            "DELETE FROM uses WHERE layout = ?",
            "DELETE FROM retentions WHERE layout = ?",
            "DELETE FROM blocks WHERE layout = ?",
            "DELETE FROM layouts WHERE id = ?",
        ):
            self._put(Row(sql, (number,)))
        self._put(Row("DELETE FROM meta WHERE name = ?", (f"{_VOLUME_ID}{number}",)))

    def rename_layout(self, fingerprint: str, name: str) -> None:
        """Give a layout, with all its rows, a name under which nobody looks for it."""
        number = self._layout_ids[name] = self._layout_ids.pop(fingerprint)
        self._put(Row("UPDATE layouts SET fingerprint = ? WHERE id = ?", (name, number)))

    def is_layout_name(self, name: str) -> bool:
        """Whether a layout has this name, be it set aside."""
        return name in self._layout_ids

    def put_salt(self, tenant: str, salt: bytes) -> None:
        """Keep a tenant's salt."""
        self._put(Row("INSERT OR REPLACE INTO salts VALUES (?, ?)", (tenant, salt)))

    def zero_removed(self) -> None:
        """Zero, from now on, what rows that are removed have left in the database."""
        self._put(Row("PRAGMA secure_delete = ON", ()))

    def put_tenant_key(self, tenant: str, wrapped: bytes) -> None:
        """Keep a tenant's wrapped secret, in place of an earlier one and of a salt in plain."""
        self._put(Row("INSERT OR REPLACE INTO tenant_keys VALUES (?, ?)", (tenant, wrapped)))
        self._put(Row("DELETE FROM salts WHERE tenant = ?", (tenant,)))

    def drop_tenant_keys(self, tenants: Iterable[str], committed: Callable[[], object]) -> None:
        """Remove tenants' secrets; `committed` once no file of the database has them any more.

        With them go rows of sessions that no cache knows of, which it would have removed: of a
        layout that could not be restored, or rows that could not be read.
        """
        for tenant in tenants:
            for sql in (
                "DELETE FROM sessions WHERE tenant = ?",
                "DELETE FROM uses WHERE tenant = ?",
                "DELETE FROM retentions WHERE tenant = ?",
                "DELETE FROM tenant_keys WHERE tenant = ?",
            ):
                self._put(Row(sql, (tenant,)))
        self.purge(committed)

    def purge(self, committed: Callable[[], object] | None = None) -> None:
        """Have what was removed before be in no file of the database any more; see Row."""
        self._put(Row("SELECT 1", (), committed, point=WritePoint.KEYS_DROPPED, purges=True))

    def put_meta(self, name: str, value: str) -> None:
        """Keep a value."""
        sql = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
        self._put(Row(sql, (name, value), point=WritePoint.CLOCK_SAVED))

    def put_block(self, layout: str, block: BlockRecord, committed: Callable[[], object]) -> None:
        """Keep a block's row; its data is durable. `committed`: see Row."""
        values = (self._layout_ids[layout], block.key, block.extent, block.num_tokens)
        self._put(Row(PUT_BLOCK, values, committed))

    def drop_block(
        self, layout: str, key: bytes, committed: Callable[[], object] | None = None
    ) -> None:
        """Remove a block's row; the writer thread calls `committed` once that is durable."""
        sql = "DELETE FROM blocks WHERE layout = ? AND key = ?"
        self._put(Row(sql, (self._layout_ids[layout], key), committed))

    def put_session(self, layout: str, session: SessionRecord) -> None:
        """Keep a session's row, in place of an earlier one, and of what was put beside that."""
        identity = (self._layout_ids[layout], session.key.tenant, session.key.session_id)
        state = (session.last_access_ns, session.ttl_ns, session.pin.value, session.ended)
        self._put(Row(PUT_SESSION, (*identity, session.spans, *state), drops_beside=True))
        if session.retain_ns is not None:
            sql = "INSERT OR REPLACE INTO retentions VALUES (?, ?, ?, ?)"
            self._put(Row(sql, (*identity, session.retain_ns)))

    def put_use(self, layout: str, key: SessionKey, last_access_ns: int) -> None:
        """Keep when a session was last used, in place of an earlier time; its row stays."""
        values = (self._layout_ids[layout], key.tenant, key.session_id, last_access_ns)
        self._put(Row("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?)", values))

    def drop_session(self, layout: str, key: SessionKey) -> None:
        """Remove a session's rows."""
        values = (self._layout_ids[layout], key.tenant, key.session_id)
        sql = "DELETE FROM sessions WHERE layout = ? AND tenant = ? AND session_id = ?"
        self._put(Row(sql, values, drops_beside=True))

    def when_committed(self, committed: Callable[[], object]) -> None:
        """Have the writer thread call `committed` once all that was put before is durable."""
        self._put(Row("SELECT 1", (), committed))

    def _put(self, row: Row) -> None:
        self._put_bytes += row.num_bytes
        self._writer.put(row)

    def close(self) -> None:
        """Commit what is waiting, if the disk takes it, and close."""
        self._closing.set()
        self._writer.close()
        for db in (self._reader, self._db):
            if db is not None:
                db.close()
        self._db = self._reader = None

    # ----------------------------------------------------------------------- the writer's thread

    def _commit(self, batch: list[Row]) -> None:
        """Commit one group, trying again for as long as the file system refuses."""
        assert self._db is not None, "the manifest is not open"  # noqa: S101
        failed = False
        while True:
            try:
                self._commit_once(self._db, batch)
                break
            except (sqlite3.Error, OSError) as error:
                self._roll_back(self._db)
                if not failed:
                    log.error("manifest_commit_failed", error=str(error), rows=len(batch))  # noqa: TRY400
                failed = True
                if self._closing.wait(RETRY_S):
                    return
        if failed:
            log.info("manifest_commit_recovered", rows=len(batch))
        self._committed_bytes += sum(row.num_bytes for row in batch)
        for row in batch:
            if row.committed is not None:
                row.committed()

    def _roll_back(self, db: sqlite3.Connection) -> None:
        """Undo what a failed commit has begun; if that fails too, BEGIN does, and we are back."""
        with contextlib.suppress(sqlite3.Error):
            if db.in_transaction:
                db.execute("ROLLBACK")

    def _commit_once(self, db: sqlite3.Connection, batch: list[Row]) -> None:
        db.execute("BEGIN IMMEDIATE")
        self._faults.reach(WritePoint.INDEX_BEGUN)
        for row in batch:
            db.execute(row.sql, row.values)
            for sql in _DROP_BESIDE if row.drops_beside else ():
                db.execute(sql, row.values[:3])
        self._faults.reach(WritePoint.INDEX_ROWS)
        db.execute("COMMIT")
        self._faults.reach(WritePoint.INDEX_COMMITTED)
        for point in {row.point for row in batch if row.point is not None}:
            self._faults.reach(point)
        if any(row.purges for row in batch):
            self._purge(db)

    def _purge(self, db: sqlite3.Connection) -> None:
        """Have nothing left of removed rows: their pages are zeroed (secure_delete), the WAL cut.

        Raises:
            sqlite3.OperationalError: somebody reads the database, and what was in it before.
        """
        (is_busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise sqlite3.OperationalError("a reader keeps the write-ahead log from being cut")
        self._faults.reach(WritePoint.WAL_TRUNCATED)


def _decoded(text: bytes) -> str:
    """Decode even a damaged text, so that it does not end the start: its row is refused later."""
    return text.decode(errors="replace")
