"""The file of the HTTP API's store: its tables, how it is opened, and the bounds of its tables.

The file is SQLite in WAL mode, readable by the service's user only. A file that cannot be used
(damage, another release's tables) is renamed, and a new one is begun: then histories are computed
again, and stored responses are gone. Tables and columns that a later release only adds are added
to an earlier release's file, and both releases can use it.

Tables are bounded: the least recently used row is deleted first. A bound is for all tenants
together, but no tenant can push out another's rows: the tenant with the most rows loses its oldest
row, again and again, until the bound holds. Conversations stay until they are deleted.

Methods run on the database's thread.
"""

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any

from inference_svc.core.errors import TranscriptError
from shared.blobs.conversation_entry import MAX_GONE
from shared.process.log import get_logger

LEFT_OF_16 = 15  # sixteenths of a byte bound left after pruning, so that pruning is rare
PRUNE_EVERY = 256  # rows added between two checks of the row bound


_INSERT = Template("INSERT OR REPLACE INTO $name VALUES ($marks)")
_LAST_USE = Template("SELECT coalesce(max(used), 0) FROM $name")
_TOUCH = Template("UPDATE $name SET used = ? WHERE ($key) = ($key_marks)")
_COUNT = Template("SELECT count(*) FROM $name")
_TOTAL = Template("SELECT coalesce(sum(size), 0) FROM $name")
# `upto`: a tenant's bytes from its newest row to this one. Rows with the largest go first, until
# enough bytes are freed: so the tenant with the most bytes loses its oldest rows.
_TAKE_BYTES = Template(
    "DELETE FROM $name WHERE ($key) IN (SELECT $key FROM (SELECT $key, size,"
    " sum(size) OVER (ORDER BY upto DESC, used) AS freed FROM (SELECT $key, size, used,"
    " sum(size) OVER (PARTITION BY tenant ORDER BY used DESC) AS upto FROM $name))"
    " WHERE freed - size < ?)"
)
_TAKE = Template(
    "DELETE FROM $name WHERE ($key) IN (SELECT $key FROM (SELECT $key, used,"
    " row_number() OVER (PARTITION BY tenant ORDER BY used DESC) AS place FROM $name)"
    " ORDER BY place DESC, used LIMIT ?) RETURNING $key"
)


class Table:
    """The SQL statements of a table with a column `tenant`, and `used` as its last column.

    Args:
        name: the table's name.
        num_columns: number of its columns.
        key: columns of its primary key.

    Attributes:
        take: deletes a given number of rows, and returns their keys.
        total: sums up the bytes of all rows, in the column `size`.
        take_bytes: deletes rows of a given number of bytes.
    """

    def __init__(self, name: str, num_columns: int, *key: str) -> None:
        words = {
            "name": name,
            "key": ", ".join(key),
            "key_marks": _placeholders(len(key)),
            "marks": _placeholders(num_columns),
        }
        self.insert = _INSERT.substitute(words)
        self.last_use = _LAST_USE.substitute(words)
        self.touch = _TOUCH.substitute(words)
        self.count = _COUNT.substitute(words)
        self.take = _TAKE.substitute(words)
        self.total = _TOTAL.substitute(words)
        self.take_bytes = _TAKE_BYTES.substitute(words)


def _placeholders(number: int) -> str:
    return ", ".join("?" * number)


HISTORIES = Table("histories", 7, "digest")
RESPONSES = Table("responses", 9, "id")
REQUESTS = Table("requests", 9, "id")
INPUTS = Table("inputs", 5, "id")
CHATS = Table("chats", 8, "id")
KEY_USES = Table("key_uses", 4, "id")
UNANSWERED = Table("unanswered", 7, "id")
SESSIONS = Table("sessions", 3, "tenant", "session")  # not pruned: a row's session goes with it
PRUNED = (HISTORIES, RESPONSES, REQUESTS, KEY_USES, UNANSWERED)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all changes of the block, or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk rolls back by itself, or fails to commit
            db.execute("ROLLBACK")
        raise


@contextmanager
def durable(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all changes of the block, or none; committed changes survive a power cut."""
    db.execute("PRAGMA synchronous = FULL")
    try:
        with transaction(db):
            yield
    finally:
        db.execute("PRAGMA synchronous = NORMAL")


class BoundedTables:
    """Adds rows to bounded tables, and deletes the least recently used ones.

    Args:
        db: the database with the tables.
        max_rows: most rows of each pruned table.
    """

    def __init__(self, db: sqlite3.Connection, max_rows: int) -> None:
        self._db = db
        self._max_rows = max_rows
        self._num_added = 0
        self._last_use: int = max(
            db.execute(table.last_use).fetchone()[0] for table in (*PRUNED, INPUTS, CHATS, SESSIONS)
        )

    def insert(self, table: Table, rows: Sequence[tuple[object, ...]]) -> None:
        """Add rows; they replace rows with the same key."""
        with transaction(self._db):
            self._db.executemany(table.insert, [(*row, self._next_use()) for row in rows])
            self._num_added += len(rows)
            if self._num_added >= PRUNE_EVERY:
                self._num_added = 0
                for pruned in PRUNED:
                    self.take(pruned, self._max_rows)

    def touch(self, table: Table, keys: Sequence[tuple[object, ...]]) -> None:
        """Record the use of rows, if they exist."""
        with transaction(self._db):
            self._db.executemany(table.touch, [(self._next_use(), *key) for key in keys])

    def take(self, table: Table, most: int) -> list[Any]:
        """Delete the rows beyond a bound, and return their keys."""
        (num_rows,) = self._db.execute(table.count).fetchone()
        excess = num_rows - most
        return self._db.execute(table.take, (excess,)).fetchall() if excess > 0 else []

    def _next_use(self) -> int:
        self._last_use += 1
        return self._last_use


class KeptBytes:
    """Bounds the bytes of a table: beyond it the tenant with the most loses its oldest rows.

    Args:
        db: the database with the table.
        tables: adds rows to it.
        table: the table.
        max_bytes: most bytes of all rows together.
    """

    def __init__(
        self, db: sqlite3.Connection, tables: BoundedTables, table: Table, max_bytes: int
    ) -> None:
        self._db = db
        self._tables = tables
        self._table = table
        self._max_bytes = max_bytes
        self._most_bytes = self._total()  # an upper bound: deletions elsewhere are not counted

    def add(self, row: tuple[object, ...], size: int) -> None:
        """Add a row of `size` bytes, unless it exceeds the bound alone; make room for it."""
        if size <= self._max_bytes:
            self._tables.insert(self._table, [row])
            self._most_bytes += size
        if self._most_bytes > self._max_bytes:
            self._make_room()

    def _make_room(self) -> None:
        total = self._total()
        if total > self._max_bytes:
            excess = total - self._max_bytes * LEFT_OF_16 // 16
            self._db.execute(self._table.take_bytes, (excess,))
            total = self._total()
        self._most_bytes = total

    def _total(self) -> int:
        (total,) = self._db.execute(self._table.total).fetchone()
        return int(total)


FILE_NAME = "openai.sqlite"
KEY_BYTES = 32  # size of the secret key of digests
SCHEMA_VERSION = 1
BUSY_S = 5.0  # SQLite's wait for another process's lock (a backup, an operator's sqlite3)

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

# Added to files of the same version. Dependent rows are deleted by triggers, so that an earlier
# release, which does not know these tables, leaves nothing behind either.
_ADDITIONS = Template("""
CREATE TABLE IF NOT EXISTS inputs (         -- of responses: their items, as JSON
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, items TEXT NOT NULL, size INTEGER NOT NULL,
    used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS inputs_tenant ON inputs (tenant, used, size);
CREATE TRIGGER IF NOT EXISTS inputs_go AFTER DELETE ON responses
    BEGIN DELETE FROM inputs WHERE id = OLD.id; END;
CREATE TABLE IF NOT EXISTS key_uses (       -- when an idempotency key was first used
    id BLOB PRIMARY KEY, unix_s INTEGER NOT NULL, tenant TEXT NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS key_uses_tenant ON key_uses (tenant, used);
CREATE TABLE IF NOT EXISTS unanswered (     -- responses in the background
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, facts TEXT NOT NULL, state TEXT NOT NULL,
    code TEXT NOT NULL, message TEXT NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS unanswered_tenant ON unanswered (tenant, used);
CREATE TABLE IF NOT EXISTS chats (          -- that clients asked to have stored, as JSON
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, metadata TEXT NOT NULL,
    completion TEXT NOT NULL, messages TEXT NOT NULL, size INTEGER NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS chats_tenant ON chats (tenant, used, size);
CREATE TABLE IF NOT EXISTS chat_sessions (  -- that have answered them
    tenant TEXT NOT NULL, session TEXT NOT NULL, chat TEXT NOT NULL,
    PRIMARY KEY (tenant, session, chat)
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS chat_sessions_chat ON chat_sessions (chat);
CREATE TRIGGER IF NOT EXISTS chats_go AFTER DELETE ON chats
    BEGIN DELETE FROM chat_sessions WHERE chat = OLD.id; END;
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, metadata TEXT NOT NULL,
    instructions TEXT NOT NULL,
    session TEXT NOT NULL, turns INTEGER NOT NULL,  -- so many turns of the session count
    request TEXT NOT NULL,                  -- id of the last of these turns; "" if there are none
    size INTEGER NOT NULL                   -- bytes that count, with those of the items
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS conversations_tenant ON conversations (tenant, size);
CREATE INDEX IF NOT EXISTS conversations_session ON conversations (tenant, session);
CREATE TABLE IF NOT EXISTS items (          -- of conversations, as JSON
    conversation TEXT NOT NULL, place INTEGER NOT NULL, id TEXT NOT NULL,
    turn INTEGER NOT NULL,                  -- that has read it, from 1; else one above all
    item TEXT NOT NULL, size INTEGER NOT NULL,
    PRIMARY KEY (conversation, place)
) WITHOUT ROWID, STRICT;
CREATE UNIQUE INDEX IF NOT EXISTS items_id ON items (conversation, id);
CREATE INDEX IF NOT EXISTS items_turn ON items (conversation, turn, size);
CREATE TRIGGER IF NOT EXISTS items_come AFTER INSERT ON items
    BEGIN UPDATE conversations SET size = size + NEW.size WHERE id = NEW.conversation; END;
CREATE TRIGGER IF NOT EXISTS items_go AFTER DELETE ON items
    BEGIN UPDATE conversations SET size = size - OLD.size WHERE id = OLD.conversation; END;
CREATE TRIGGER IF NOT EXISTS conversations_change AFTER UPDATE OF metadata, instructions
    ON conversations BEGIN UPDATE conversations SET size = size
    + length(CAST(NEW.metadata || NEW.instructions AS BLOB))
    - length(CAST(OLD.metadata || OLD.instructions AS BLOB)) WHERE id = NEW.id; END;
CREATE TRIGGER IF NOT EXISTS conversations_go AFTER DELETE ON conversations
    BEGIN DELETE FROM items WHERE conversation = OLD.id; END;
CREATE TABLE IF NOT EXISTS versions (       -- of conversations, in the store that services share
    conversation TEXT PRIMARY KEY,
    number INTEGER NOT NULL,                -- of the one that the rows come from; 0: none was there
    behind INTEGER NOT NULL                 -- whether the rows are others than its
) WITHOUT ROWID, STRICT;
CREATE INDEX IF NOT EXISTS versions_behind ON versions (behind);
CREATE TABLE IF NOT EXISTS gone (           -- the last items of conversations that were deleted
    conversation TEXT NOT NULL, number INTEGER NOT NULL, item TEXT NOT NULL,
    PRIMARY KEY (conversation, number)
) WITHOUT ROWID, STRICT;
INSERT OR IGNORE INTO versions SELECT id, 0, 1 FROM conversations;
CREATE TRIGGER IF NOT EXISTS versions_come AFTER INSERT ON conversations
    BEGIN INSERT INTO versions VALUES (NEW.id, 0, 1); END;
CREATE TRIGGER IF NOT EXISTS versions_fall_behind
    AFTER UPDATE OF metadata, instructions, session, turns, request ON conversations
    BEGIN UPDATE versions SET behind = 1 WHERE conversation = NEW.id; END;
CREATE TRIGGER IF NOT EXISTS versions_go AFTER DELETE ON conversations BEGIN
    DELETE FROM versions WHERE conversation = OLD.id;
    DELETE FROM gone WHERE conversation = OLD.id; END;
CREATE TRIGGER IF NOT EXISTS versions_lack_items AFTER INSERT ON items
    BEGIN UPDATE versions SET behind = 1 WHERE conversation = NEW.conversation; END;
CREATE TRIGGER IF NOT EXISTS versions_have_items AFTER DELETE ON items BEGIN
    UPDATE versions SET behind = 1 WHERE conversation = OLD.conversation;
    INSERT INTO gone SELECT conversation, 1 + coalesce((SELECT max(number) FROM gone
    WHERE conversation = OLD.conversation), 0), OLD.id FROM versions
    WHERE conversation = OLD.conversation;
    DELETE FROM gone WHERE conversation = OLD.conversation AND number <= (SELECT max(number)
    FROM gone WHERE conversation = OLD.conversation) - $most_gone; END;
""").substitute(most_gone=MAX_GONE)

log = get_logger(__name__)


def open_store(directory: Path) -> tuple[sqlite3.Connection, bytes]:
    """Open or create the store's file.

    Returns:
        The connection, and the secret key of digests.

    Raises:
        TranscriptError: the directory cannot be used.
    """
    path = directory / FILE_NAME
    try:
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):  # locked, no access, or a full or failing disk
                raise
            moved = _set_aside(path)
            log.warning("openai_memory_set_aside", moved_to=str(moved), error=str(error))
            return _open(path)
    except (OSError, sqlite3.Error) as error:
        raise TranscriptError(
            f"{path} cannot be used ({error})",
            "give a directory that this user may write to with --state-dir",
        ) from error


def _open(path: Path) -> tuple[sqlite3.Connection, bytes]:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # rows lost in a power cut are only recomputed
        db.execute("PRAGMA secure_delete = ON")  # deleted rows hold users' text: overwrite it
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif version != SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"its tables are of version {version}")  # noqa: TRY301
        db.executescript(f"BEGIN; {_ADDITIONS} COMMIT;")
        return db, _secret(db)
    except BaseException:
        db.close()
        raise


def _secret(db: sqlite3.Connection) -> bytes:
    """Return the secret key of digests, which is drawn once per file."""
    new = secrets.token_bytes(KEY_BYTES)
    db.execute("INSERT OR IGNORE INTO meta VALUES ('key', ?)", (new,))
    (key,) = db.execute("SELECT value FROM meta WHERE name = 'key'").fetchone()
    return bytes(key)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether opening failed because of the file's content; else the file is kept."""
    code = getattr(error, "sqlite_errorcode", None)
    return type(error) is sqlite3.DatabaseError or code == sqlite3.SQLITE_ERROR


def _set_aside(path: Path) -> Path:
    """Rename the file and SQLite's files beside it; nothing is deleted or overwritten."""
    number = 1
    while (moved := path.with_name(f"{path.name}.unusable-{number}")).exists():
        number += 1
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(moved.with_name(moved.name + suffix))
    return path.rename(moved)
