"""Another master key in place of the old one: tenants' secrets are wrapped anew, all at once.

One transaction: a kill leaves the old key or the new one, never some of each. Blocks on SSD are not
touched, because the keys that seal them stay the same.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from kvd.caches.tenant_secrets import META_NAME, EncryptionNote
from kvd.encryption.errors import KeyFileError, WrongKeyError
from kvd.encryption.key_file import MasterKey
from kvd.encryption.keyring import open_secret, wrap_secret
from kvd.errors import NotDurableError
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.index_database import open_database


def rotate(path: Path, volumes: Path, before: MasterKey, after: MasterKey, faults: Faults) -> int:
    """Wrap all secrets in an index by another key; returns how many there are.

    Args:
        path: of the database; no kvd has it open.
        volumes: see open_database.
        before: the key until now.
        after: the key from now on.
        faults: see kvd/tiers/faults.py.

    Raises:
        KeyFileError: there is no index.
        WrongKeyError: the secrets are not wrapped by `before`; nothing was done.
        NotDurableError: the disk did not take it; nothing was done.
    """
    if not path.exists():
        raise KeyFileError(f"there is no {path}", "name the directory with --state-dir")
    with closing(open_database(path, volumes, faults)) as db:
        note = _note(db)
        secrets = db.execute("SELECT tenant, wrapped FROM tenant_keys").fetchall()
        wrapped = [
            (wrap_secret(after, tenant, opened), tenant)
            for tenant, secret in secrets
            if (opened := open_secret(before, tenant, secret)) is not None
        ]
        is_wrong = note.key != before.fingerprint if note.key else not wrapped
        if secrets and is_wrong:
            raise WrongKeyError(
                f"the key until now ({before.fingerprint[:8]}) is not the one that wraps the "
                f"tenants' keys ({note.key[:8] or 'not known'})",
                "name the file of that key with --old",
            )
        try:
            _write(db, wrapped, EncryptionNote(after.fingerprint, note.has_plain), faults)
        except sqlite3.Error as error:
            raise NotDurableError(
                f"the index did not take the keys ({error})", "free some space, and try again"
            ) from error
    return len(wrapped)


def _note(db: sqlite3.Connection) -> EncryptionNote:
    found = db.execute("SELECT value FROM meta WHERE name = ?", (META_NAME,)).fetchone()
    return EncryptionNote.read(found[0] if found else "")


def _write(
    db: sqlite3.Connection,
    wrapped: list[tuple[bytes, str]],
    note: EncryptionNote,
    faults: Faults,
) -> None:
    db.execute("PRAGMA secure_delete = ON")
    db.execute("BEGIN IMMEDIATE")
    db.executemany("UPDATE tenant_keys SET wrapped = ? WHERE tenant = ?", wrapped)
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (META_NAME, note.text()))
    faults.reach(WritePoint.INDEX_ROWS)
    db.execute("COMMIT")
    faults.reach(WritePoint.KEYS_DROPPED)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
