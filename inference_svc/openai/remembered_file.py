"""The file of what is remembered between requests: its tables, and opening it.

SQLite in WAL mode, readable by the service's user only. A file that cannot be used as it is
(damage, another release's tables) is set aside and begun anew: histories are then computed again,
and responses are not there.
"""

import contextlib
import os
import secrets
import sqlite3
from pathlib import Path

from inference_svc.core.errors import TranscriptError
from inference_svc.openai.history_chain import KEY_BYTES
from shared.process.log import get_logger

FILE_NAME = "openai.sqlite"
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


def open_remembered(directory: Path) -> tuple[sqlite3.Connection, bytes]:
    """Open or create the file; return the connection and the secret of its digests.

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
