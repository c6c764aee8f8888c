"""The index of SSD: layouts, sessions, blocks, tenants' salts and keys, and the clock.

Invariants:
1. A block's row is written only after its data is durable. It is removed, and that is committed,
   before its extent is used again. The cache engine ensures this order; this module preserves the
   order in which rows are put.
2. One thread writes rows in groups: one commit, and one sync, for all rows that are waiting.

A commit that fails (disk full) is repeated until it succeeds; loads and stores are served
meanwhile. The bytes of waiting rows are bounded: callers check `room_bytes` before they put rows.
Rows of layouts, tenants and the clock are few, and are put without that check.
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
GATHER_S = 0.01  # between commits: each syncs the disk, and data writes wait for the sync
MAX_QUEUED_BYTES = 8 << 20  # bytes of rows that are not committed
ROW_BYTES = 256  # memory of a queued row, without its values
RETRY_S = 1.0  # between two attempts at a commit

SET_ASIDE = ".set-aside-"  # between fingerprint and number, in names of rows and files set aside
_VOLUME_ID = "volume_id:"  # prefix of a layout's number, in the name of a meta value

PUT_BLOCK = "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)"
PUT_SESSION = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
_DROP_BESIDE = (
    "DELETE FROM uses WHERE layout = ? AND tenant = ? AND session_id = ?",
    "DELETE FROM retentions WHERE layout = ? AND tenant = ? AND session_id = ?",
)
_PUT_RETENTION = "INSERT OR REPLACE INTO retentions VALUES (?, ?, ?, ?)"

Value: TypeAlias = str | bytes | int | None

log = get_logger(__name__)


@dataclass(frozen=True)
class LayoutRow:
    """A layout that has a volume.

    Attributes:
        fingerprint: the layout's fingerprint.
        message: serialised kvd.v1.KVLayout; b"": the row is damaged.
        extents_per_segment: number of extents in a segment of the volume; 0: the row is damaged.
        volume_id: id of the volume, see kvd/tiers/volume_identity.py; "": the volume has none yet.
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
        on_commit: called by the writer thread after the commit.
        point: write point that is reached after the commit.
        purges: whether removed rows must have left every file of the database after the commit.
        drops_beside: whether the first three values name a session, whose rows in other tables are
            removed in the same commit: after a kill an older use must not replace a newer one.
        retain_ns: the session's retention, which is put in the same commit, too; None: it has none.
    """

    sql: str
    values: tuple[Value, ...]
    on_commit: Callable[[], object] | None = None
    point: WritePoint | None = None
    purges: bool = False
    drops_beside: bool = False
    retain_ns: int | None = None

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the row while it waits."""
        return ROW_BYTES + sum(len(v) for v in self.values if isinstance(v, (str, bytes)))


class Manifest:
    """The index. It is read at the start; afterwards rows are only put.

    Args:
        path: path of the database.
        volumes: directory of the volumes, which is set aside together with an older index.
        faults: faults that tests inject, see kvd/tiers/faults.py.
    """

    def __init__(self, path: Path, volumes: Path, faults: Faults) -> None:
        self._path = path
        self._volumes = volumes
        self._faults = faults
        self._db: sqlite3.Connection | None = None  # used by the writer thread
        self._reader: sqlite3.Connection | None = None  # used by callers, outside transactions
        self._layout_ids: dict[str, int] = {}
        self._closing = threading.Event()
        self._writer: BatchWorker[Row] = BatchWorker(
            "kvd-manifest", self._commit, MAX_BATCH, GATHER_S
        )
        # Two counters, so that each has one writing thread and needs no lock.
        self._put_bytes = 0  # bytes of all rows so far; written by callers
        self._committed_bytes = 0  # bytes of committed rows; written by the writer thread

    def open(self) -> None:
        """Open or create the database; see open_database().

        Raises:
            NewerManifestError: the schema is newer than this release.
            UnusableManifestError: the database cannot be opened, although it may be intact.
        """
        self._db = open_database(self._path, self._volumes, self._faults)
        self._reader = sqlite3.connect(self._path, timeout=BUSY_S)
        self._reader.text_factory = _decode_text
        self._layout_ids = dict(self._query("SELECT fingerprint, id FROM layouts"))
        self._writer.start()

    # --------------------------------------------------------------------------------- reading

    def layouts(self) -> list[LayoutRow]:
        """Return the layouts that have a volume, without those that are set aside."""
        rows = self._query(
            "SELECT fingerprint, iif(typeof(message) = 'blob', message, x''), "
            "iif(typeof(extents_per_segment) = 'integer', max(extents_per_segment, 0), 0), "
            "coalesce(value, '') FROM layouts LEFT JOIN meta ON name = ? || id "
            "WHERE instr(fingerprint, ?) = 0",
            *(_VOLUME_ID, SET_ASIDE),
        )
        return [LayoutRow(*row) for row in rows]

    def has_blocks(self, layout: str | None = None) -> bool:
        """Whether the index has a block of a layout (by fingerprint), or of any layout."""
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
        """Return the value that put_meta() has stored under a name; "" if there is none."""
        rows = list(self._query("SELECT value FROM meta WHERE name = ?", name))
        return str(rows[0][0]) if rows else ""

    def rows(self, layout: KVLayout) -> IndexEntries:
        """Return the blocks and sessions of a layout, in any order.

        Sessions are read lazily. Rows that cannot be decoded are left out.

        Raises:
            ValueError: the layout is not in the index (its row may be damaged).
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
        """Bytes of rows that may be put now; the last row may exceed them a little."""
        return max(0, MAX_QUEUED_BYTES - self.queued_bytes)

    def put_layout(self, row: LayoutRow) -> None:
        """Add a layout; afterwards rows of its blocks and sessions may be put."""
        number = max(self._layout_ids.values(), default=0) + 1
        number = self._layout_ids.setdefault(row.fingerprint, number)
        values = (number, row.fingerprint, row.message, row.extents_per_segment)
        self._put(Row("INSERT OR REPLACE INTO layouts VALUES (?, ?, ?, ?)", values))
        if row.volume_id:
            meta = (f"{_VOLUME_ID}{number}", row.volume_id)
            self._put(Row("INSERT OR REPLACE INTO meta VALUES (?, ?)", meta))

    def drop_layout(self, fingerprint: str) -> None:
        """Remove a layout and all rows that name it."""
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
        """Set a layout aside: give it, with all its rows, a name that no lookup uses."""
        number = self._layout_ids[name] = self._layout_ids.pop(fingerprint)
        self._put(Row("UPDATE layouts SET fingerprint = ? WHERE id = ?", (name, number)))

    def is_layout_name(self, name: str) -> bool:
        """Whether a layout has this name; layouts set aside are included."""
        return name in self._layout_ids

    def put_salt(self, tenant: str, salt: bytes) -> None:
        """Store a tenant's salt."""
        self._put(Row("INSERT OR REPLACE INTO salts VALUES (?, ?)", (tenant, salt)))

    def zero_removed(self) -> None:
        """Have SQLite overwrite removed rows with zeros from now on."""
        self._put(Row("PRAGMA secure_delete = ON", ()))

    def put_tenant_key(self, tenant: str, wrapped: bytes) -> None:
        """Store a tenant's wrapped secret; it replaces an earlier one and a plain salt."""
        self._put(Row("INSERT OR REPLACE INTO tenant_keys VALUES (?, ?)", (tenant, wrapped)))
        self._put(Row("DELETE FROM salts WHERE tenant = ?", (tenant,)))

    def drop_tenant_keys(self, tenants: Iterable[str], on_commit: Callable[[], object]) -> None:
        """Remove tenants' secrets.

        Also removed are the tenants' sessions that no cache knows of, and so none has removed: of
        a layout that could not be restored, or in rows that could not be read.

        Args:
            tenants: names of the tenants.
            on_commit: called by the writer thread once no file of the database has the secrets.
        """
        for tenant in tenants:
            for sql in (
                "DELETE FROM sessions WHERE tenant = ?",
                "DELETE FROM uses WHERE tenant = ?",
                "DELETE FROM retentions WHERE tenant = ?",
                "DELETE FROM tenant_keys WHERE tenant = ?",
            ):
                self._put(Row(sql, (tenant,)))
        self.purge(on_commit)

    def purge(self, on_commit: Callable[[], object] | None = None) -> None:
        """Purge rows that were removed before from every file of the database; see Row."""
        self._put(Row("SELECT 1", (), on_commit, point=WritePoint.KEYS_DROPPED, purges=True))

    def put_meta(self, name: str, value: str) -> None:
        """Store a value under a name."""
        sql = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
        self._put(Row(sql, (name, value), point=WritePoint.CLOCK_SAVED))

    def put_block(self, layout: str, block: BlockRecord, on_commit: Callable[[], object]) -> None:
        """Store the row of a block whose data is durable; `on_commit` as in Row."""
        values = (self._layout_ids[layout], block.key, block.extent, block.num_tokens)
        self._put(Row(PUT_BLOCK, values, on_commit))

    def drop_block(
        self, layout: str, key: bytes, on_commit: Callable[[], object] | None = None
    ) -> None:
        """Remove a block's row; `on_commit` as in Row."""
        sql = "DELETE FROM blocks WHERE layout = ? AND key = ?"
        self._put(Row(sql, (self._layout_ids[layout], key), on_commit))

    def put_session(self, layout: str, session: SessionRecord) -> None:
        """Store a session's row; it replaces earlier rows of the session in all tables."""
        identity = (self._layout_ids[layout], session.key.tenant, session.key.session_id)
        state = (session.last_access_ns, session.ttl_ns, session.pin.value, session.ended)
        values = (*identity, session.spans, *state)
        self._put(Row(PUT_SESSION, values, drops_beside=True, retain_ns=session.retain_ns))

    def put_use(self, layout: str, key: SessionKey, last_access_ns: int) -> None:
        """Store the time of a session's last use beside its row, which stays."""
        values = (self._layout_ids[layout], key.tenant, key.session_id, last_access_ns)
        self._put(Row("INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?)", values))

    def drop_session(self, layout: str, key: SessionKey) -> None:
        """Remove a session's rows."""
        values = (self._layout_ids[layout], key.tenant, key.session_id)
        sql = "DELETE FROM sessions WHERE layout = ? AND tenant = ? AND session_id = ?"
        self._put(Row(sql, values, drops_beside=True))

    def when_committed(self, callback: Callable[[], object]) -> None:
        """Have the writer thread call `callback` once all rows put before are durable."""
        self._put(Row("SELECT 1", (), callback))

    def _put(self, row: Row) -> None:
        self._put_bytes += row.num_bytes
        self._writer.put(row)

    def close(self) -> None:
        """Commit the waiting rows if that succeeds at once, and close the database."""
        self._closing.set()
        self._writer.close()
        for db in (self._reader, self._db):
            if db is not None:
                db.close()
        self._db = self._reader = None

    # -------------------------------------------------------------------------- the writer thread

    def _commit(self, batch: list[Row]) -> None:
        """Commit one group of rows; repeat until it succeeds or the manifest is closed."""
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
            if row.on_commit is not None:
                row.on_commit()

    def _roll_back(self, db: sqlite3.Connection) -> None:
        """Undo a failed commit. If this fails, the next BEGIN fails, and it is called again."""
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
            if row.retain_ns is not None:
                db.execute(_PUT_RETENTION, (*row.values[:3], row.retain_ns))
        self._faults.reach(WritePoint.INDEX_ROWS)
        db.execute("COMMIT")
        self._faults.reach(WritePoint.INDEX_COMMITTED)
        for point in {row.point for row in batch if row.point is not None}:
            self._faults.reach(point)
        if any(row.purges for row in batch):
            self._purge(db)

    def _purge(self, db: sqlite3.Connection) -> None:
        """Remove the last traces of removed rows: truncate the WAL after a checkpoint.

        The rows' pages in the database itself are zeroed by secure_delete.

        Raises:
            sqlite3.OperationalError: a reader of the database still uses the WAL.
        """
        (is_busy, _, _) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if is_busy:
            raise sqlite3.OperationalError("a reader keeps the write-ahead log from being cut")
        self._faults.reach(WritePoint.WAL_TRUNCATED)


def _decode_text(text: bytes) -> str:
    """Decode text, damaged text included: the start must not fail, the row is refused later."""
    return text.decode(errors="replace")
