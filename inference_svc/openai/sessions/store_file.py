"""The file of what is remembered between requests: its tables, opening it, and their bounds.

SQLite in WAL mode, readable by the service's user only. A file that cannot be used as it is
(damage, another release's tables) is set aside and begun anew: histories are then computed again,
and responses are not there.

Tables are bounded: the row that was not used for longest goes first. The bound is for all tenants
together, and one of them cannot push out another's rows by adding its own: who has the most rows
gives up its oldest, again and again, until the bound holds.

Methods run on one thread: that of the database.
"""

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inference_svc.core.errors import TranscriptError
from shared.process.log import get_logger

PRUNE_EVERY = 256  # rows that are added between two looks at the bound


@dataclass(frozen=True)
class Table:
    """What is said to a table; `prune` and `take` get how many rows are to go."""

    insert: str
    last_use: str
    touch: str = ""
    count: str = ""
    prune: str = ""
    take: str = ""


HISTORIES = Table(
    "INSERT OR REPLACE INTO histories VALUES (?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM histories",
    "UPDATE histories SET used = ? WHERE digest = ?",
    "SELECT count(*) FROM histories",
    "DELETE FROM histories WHERE digest IN (SELECT digest FROM (SELECT digest, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM histories)"
    " ORDER BY place DESC, used LIMIT ?)",
)
RESPONSES = Table(
    "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM responses",
    "UPDATE responses SET used = ? WHERE id = ?",
    "SELECT count(*) FROM responses",
    "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM responses)"
    " ORDER BY place DESC, used LIMIT ?)",
)
REQUESTS = Table(
    "INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM requests",
    "UPDATE requests SET used = ? WHERE id = ?",
    "SELECT count(*) FROM requests",
    "DELETE FROM requests WHERE id IN (SELECT id FROM (SELECT id, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM requests)"
    " ORDER BY place DESC, used LIMIT ?)",
)
SESSIONS = Table(  # who takes a row away takes the session, too
    "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?)",
    "SELECT coalesce(max(used), 0) FROM sessions",
    "UPDATE sessions SET used = ? WHERE (tenant, session) = (?, ?)",
    "SELECT count(*) FROM sessions",
    take="DELETE FROM sessions WHERE (tenant, session) IN (SELECT tenant, session FROM"
    " (SELECT tenant, session, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM sessions)"
    " ORDER BY place DESC, used LIMIT ?) RETURNING tenant, session",
)
PRUNED = (HISTORIES, RESPONSES, REQUESTS)


class BoundedTables:
    """See the module docstring.

    Args:
        db: where they are.
        max_rows: of each table.
    """

    def __init__(self, db: sqlite3.Connection, max_rows: int) -> None:
        self._db = db
        self._max_rows = max_rows
        self._num_added = 0
        self._last_use: int = max(
            db.execute(table.last_use).fetchone()[0] for table in (*PRUNED, SESSIONS)
        )

    def insert(self, table: Table, rows: Sequence[tuple[object, ...]]) -> None:
        """Add rows, or put them in the place of those with the same key."""
        with self._transaction():
            self._db.executemany(table.insert, [(*row, self._use()) for row in rows])
            self._num_added += len(rows)
            if self._num_added >= PRUNE_EVERY:
                self._num_added = 0
                self._prune()

    def touch(self, table: Table, keys: Sequence[tuple[object, ...]]) -> None:
        """Note that rows were used, if they are there."""
        with self._transaction():
            self._db.executemany(table.touch, [(self._use(), *key) for key in keys])

    def take(self, table: Table, most: int) -> list[tuple[str, str]]:
        """Remove what is beyond a bound of its own; the caller looks after what they name."""
        excess = self._excess(table, most)
        return self._db.execute(table.take, (excess,)).fetchall() if excess > 0 else []

    def _prune(self) -> None:
        for table in PRUNED:
            excess = self._excess(table, self._max_rows)
            if excess > 0:
                self._db.execute(table.prune, (excess,))

    def _excess(self, table: Table, most: int) -> int:
        (num_rows,) = self._db.execute(table.count).fetchone()
        return int(num_rows) - most

    def _use(self) -> int:
        self._last_use += 1
        return self._last_use

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # a full disk rolls back by itself, or fails to commit
                self._db.execute("ROLLBACK")
            raise


FILE_NAME = "openai.sqlite"
KEY_BYTES = 32  # of the secret that digests are keyed with
SCHEMA_VERSION = 1
BUSY_S = 5.0  # SQLite's wait for somebody's lock (a backup, an operator's sqlite3)

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID, STRICT;
CREATE TABLE histories (                    -- where a history ends: after `turns` of a session
    digest BLOB PRIMARY KEY, session TEXT NOT NULL, turns INTEGER NOT NULL,
    request TEXT NOT NULL,                  -- id of the last of these turns
    named INTEGER NOT NULL, tenant TEXT NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX histories_tenant ON histories (tenant, used);
CREATE TABLE responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, turns INTEGER NOT NULL,
    request TEXT NOT NULL, named INTEGER NOT NULL,
    history BLOB,                           -- digest after the turn, if it is known
    facts TEXT NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX responses_tenant ON responses (tenant, used);
CREATE INDEX responses_session ON responses (tenant, session);
CREATE TABLE requests (                     -- where a request with an idempotency key went
    id BLOB PRIMARY KEY, body BLOB NOT NULL, session TEXT NOT NULL, turns INTEGER NOT NULL,
    first INTEGER NOT NULL, history BLOB, named INTEGER NOT NULL, tenant TEXT NOT NULL,
    used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX requests_tenant ON requests (tenant, used);
CREATE TABLE sessions (                     -- that requests opened without naming them
    tenant TEXT NOT NULL, session TEXT NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (tenant, session)
) WITHOUT ROWID, STRICT;
CREATE INDEX sessions_tenant ON sessions (tenant, used);
CREATE TABLE passing (                      -- sessions that go when their turn is over
    tenant TEXT NOT NULL, session TEXT NOT NULL, PRIMARY KEY (tenant, session)
) WITHOUT ROWID, STRICT;
"""

log = get_logger(__name__)


def open_store(directory: Path) -> tuple[sqlite3.Connection, bytes]:
    """Open or create the file.

    Returns:
        The connection, and the secret key of its digests.

    Raises:
        TranscriptError: the directory cannot be used.
    """
    path = directory / FILE_NAME
    try:
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):  # locked, no access, a disk that is full or fails
                raise
            moved = _set_aside(path)
            log.warning("openai_memory_set_aside", moved_to=str(moved), error=str(error))
            return _open(path)
    except (OSError, sqlite3.Error) as error:
        raise TranscriptError(
            f"{path} cannot be used ({error})", "give --state-dir a directory this user may write"
        ) from error


def _open(path: Path) -> tuple[sqlite3.Connection, bytes]:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # a power cut costs a recomputation, no more
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its tables are of version {version}")  # noqa: TRY301
        return db, _secret(db)
    except BaseException:
        db.close()
        raise


def _secret(db: sqlite3.Connection) -> bytes:
    """The key of all digests; drawn once."""
    new = secrets.token_bytes(KEY_BYTES)
    db.execute("INSERT OR IGNORE INTO meta VALUES ('key', ?)", (new,))
    (key,) = db.execute("SELECT value FROM meta WHERE name = 'key'").fetchone()
    return bytes(key)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether opening failed because of what is in the file: else it may be fine, and stays."""
    code = getattr(error, "sqlite_errorcode", None)
    return type(error) is sqlite3.DatabaseError or code == sqlite3.SQLITE_ERROR


def _set_aside(path: Path) -> Path:
    """Rename the file, and what SQLite keeps beside it; nothing is deleted or overwritten."""
    number = 1
    while (moved := path.with_name(f"{path.name}.unusable-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(moved.with_name(moved.name + suffix))
    return path.rename(moved)
