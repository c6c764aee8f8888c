"""The database file of the index: its tables, and how an unusable file is handled.

The database is SQLite in WAL mode. A file that is damaged or has too old a schema is renamed,
never deleted. An older file's volumes are renamed with it, because only that index describes their
extents. A file with a newer schema is refused.
"""

import contextlib
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from kvd.tiers.faults import Faults, WritePoint
from shared.process.log import get_logger
from shared.types.errors import ConfigError

MANIFEST_NAME = "manifest.db"  # in the state directory
SCHEMA_VERSION = 5
OLDEST_VERSION = 2  # the oldest that is read: tables that it lacks are added
_WAL_FORMAT = 2  # the highest valid value of bytes 18 and 19 of a database file
BUSY_S = 5.0  # how long SQLite waits for another process's lock (a backup, an operator's sqlite3)

_SCHEMA = """
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS meta (
    name TEXT PRIMARY KEY, value TEXT NOT NULL
) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS layouts (
    id INTEGER PRIMARY KEY,
    fingerprint TEXT NOT NULL UNIQUE,
    message BLOB NOT NULL,                  -- kvd.v1.KVLayout, serialised
    extents_per_segment INTEGER NOT NULL    -- where an extent lies: fixed for the volume's life
) STRICT;
CREATE TABLE IF NOT EXISTS salts (
    tenant TEXT PRIMARY KEY, salt BLOB NOT NULL
) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS tenant_keys (
    tenant TEXT PRIMARY KEY,
    wrapped BLOB NOT NULL                   -- see kvd/encryption/keyring.py
) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS blocks (
    layout INTEGER NOT NULL, key BLOB NOT NULL,
    extent INTEGER NOT NULL,                -- first sector in the volume
    num_tokens INTEGER NOT NULL,
    PRIMARY KEY (layout, key)
) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS sessions (
    layout INTEGER NOT NULL, tenant TEXT NOT NULL, session_id TEXT NOT NULL,
    spans BLOB NOT NULL,                    -- see kvd/core/records/entries.py
    last_access_ns INTEGER NOT NULL,        -- of kvd's clock
    ttl_ns INTEGER,                         -- NULL: the default
    pin INTEGER NOT NULL, ended INTEGER NOT NULL,
    PRIMARY KEY (layout, tenant, session_id)
) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS uses (           -- apart from spans, which may be long
    layout INTEGER NOT NULL, tenant TEXT NOT NULL, session_id TEXT NOT NULL,
    last_access_ns INTEGER NOT NULL,        -- after its row was written: counts instead
    PRIMARY KEY (layout, tenant, session_id)
) WITHOUT ROWID, STRICT;
CREATE TABLE IF NOT EXISTS retentions (     -- of sessions that are retained
    layout INTEGER NOT NULL, tenant TEXT NOT NULL, session_id TEXT NOT NULL,
    retain_ns INTEGER NOT NULL,             -- after a use
    PRIMARY KEY (layout, tenant, session_id)
) WITHOUT ROWID, STRICT;
"""

log = get_logger(__name__)


class NewerManifestError(ConfigError):
    """The state directory was written by a newer release."""

    reason = "newer_manifest"


class UnusableManifestError(ConfigError):
    """The index cannot be opened, although it may be fine."""

    reason = "unusable_manifest"


class _OlderSchemaError(Exception):
    """The database has a schema of an older release."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def open_database(path: Path, volumes: Path, faults: Faults) -> sqlite3.Connection:
    """Open or create the index. Set an unusable file aside, and start with an empty index.

    Args:
        path: path of the database.
        volumes: directory of the volumes that the index describes.
        faults: faults that tests inject, see kvd/tiers/faults.py.

    Raises:
        NewerManifestError: the schema is newer than this release.
        UnusableManifestError: the file cannot be opened, although it may be intact.
    """
    try:
        try:
            return _connect(path, faults)
        except _OlderSchemaError as error:
            _set_older_aside(path, volumes, error.version, faults)
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if not _is_damage(error):  # locked, no access or disk full: the file may be intact
                raise
            moved = _rename(_with_companions(path), ".corrupt-{}")
            log.error("manifest_corrupt", error=str(error), moved_to=moved)  # noqa: TRY400
        return _connect(path, faults)
    except (sqlite3.Error, OSError) as error:
        raise UnusableManifestError(
            f"cannot open the index {path} ({error})",
            "let kvd write to state_dir, and check that its disk has free space",
        ) from error


def _is_damage(error: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    """Whether opening failed because of the file's contents.

    Damage that SQLite recognizes is a plain DatabaseError. Other damage appears as an error in a
    statement (SQLITE_ERROR), since our statements have none, or as a message that quotes bytes that
    are not text (UnicodeDecodeError).
    """
    if isinstance(error, UnicodeDecodeError) or type(error) is sqlite3.DatabaseError:
        return True
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _check_header(path: Path) -> None:
    """Refuse a damaged header that SQLite would take for that of a read-only file.

    Raises:
        sqlite3.DatabaseError: the header's version bytes are not valid.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if any(version > _WAL_FORMAT for version in file.read(20)[18:]):
            raise sqlite3.DatabaseError("its header has an unknown format")


def _connect(path: Path, faults: Faults) -> sqlite3.Connection:
    _check_header(path)
    db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)  # noqa: TRY301
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise NewerManifestError(  # noqa: TRY301
                f"the index {path} has schema {version}, but this release knows only "
                f"{SCHEMA_VERSION}",
                "start the release that wrote it, or set another state_dir",
            )
        if 0 < version < OLDEST_VERSION:
            raise _OlderSchemaError(version)  # noqa: TRY301
        faults.reach(WritePoint.INDEX_CREATED)
        if version != SCHEMA_VERSION:  # else write nothing: kvd must start on a full disk
            db.executescript(f"{_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        _check_tables(db)
    except BaseException:
        db.close()
        raise
    return db


def _check_tables(db: sqlite3.Connection) -> None:
    """Raise sqlite3.DatabaseError unless the tables are those of a new database."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
        new.executescript(f"{_SCHEMA} COMMIT;")
        if _tables(db) != _tables(new):
            raise sqlite3.DatabaseError("its tables do not match its schema")


_COMMENT = re.compile(rb"--[^\n]*")


def _tables(db: sqlite3.Connection) -> list[bytes]:
    """Return the tables' CREATE statements without comments.

    SQLite stores the statements as they were written, and comments differ between releases.
    """
    query = (  # as bytes: a damaged statement may not be valid text
        "SELECT CAST(sql AS BLOB) FROM sqlite_schema WHERE type = 'table' ORDER BY name"
    )
    statements = (sql or b"" for (sql,) in db.execute(query))
    return [b" ".join(_COMMENT.sub(b"", sql).split()) for sql in statements]


def _set_older_aside(path: Path, volumes: Path, version: int, faults: Faults) -> None:
    """Rename an older index and its volumes.

    The index is last: after a kill in between, the next start finds it and continues.
    """
    suffix = f".schema-{version}-{{}}"
    moved = [_rename([volumes], suffix)] if volumes.exists() else []
    faults.reach(WritePoint.INDEX_SET_ASIDE)
    moved.append(_rename(_with_companions(path), suffix))
    log.warning(
        "manifest_older",
        schema=version,
        moved_to=" ".join(moved),
        remedy="delete them, or rename them back and start the release that wrote them",
    )


def _with_companions(path: Path) -> list[Path]:
    """Return the paths of a database and of SQLite's files beside it, the database last."""
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "")]


def _rename(paths: Iterable[Path], suffix: str) -> str:
    """Rename a file and its companions.

    Args:
        paths: companions, which may be missing, and the main file, which exists. All are in one
            directory.
        suffix: text to append to the main file's name. {} in it becomes the first number for which
            no file has that name.

    Returns:
        The main file's new path.
    """
    *companions, main = paths
    number = 1
    while (moved := main.with_name(main.name + suffix.format(number))).exists():
        number += 1
    for companion in companions:
        if companion.exists():
            companion.rename(moved.with_name(moved.name + companion.name.removeprefix(main.name)))
    main.rename(moved)
    return str(moved)
