"""The secrets of tenants: each has a salt and, with a key file, a data key.

Secrets are read at the start; a tenant's secret is created at its first block. Without a key file
the index holds salts in plain, and nothing is sealed. With a key file each tenant has a salt and a
key, which are wrapped (kvd/encryption/keyring.py); earlier plain salts are wrapped at once.

The meta value "encryption" of the index is a note: which master key wraps the secrets, and whether
there may be plain blocks on SSD, in used or free space. It is a single value, so that a kill cannot
leave one without the other.

Invariant: a tenant's secret is put into the index before any entry that depends on it.

The master key is rotated while no kvd runs. One transaction wraps all secrets again: a kill leaves
the old key or the new one, never some secrets of each. Blocks on SSD stay as they are, because the
keys that seal them do not change.
"""

import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from kvd.config import EncryptionSettings
from kvd.encryption.keyring import (
    KeyNeededError,
    Keyring,
    WrongKeyError,
    open_secret,
    wrap_secret,
)
from kvd.errors import LimitReachedError, NotDurableError
from kvd.tiers.faults import Faults, WritePoint
from kvd.tiers.index_database import open_database
from kvd.tiers.manifest import Manifest
from shared.encryption.key_file import KeyFileError, SecretKey, read_key
from shared.process.log import get_logger
from shared.types.block_key import SALT_BYTES

META_NAME = "encryption"

log = get_logger(__name__)


@dataclass(frozen=True)
class EncryptionNote:
    """The index's note on encryption.

    Attributes:
        key: fingerprint of the master key; "": there is none.
        has_plain: whether there may be plain blocks on SSD.
    """

    key: str = ""
    has_plain: bool = True

    @classmethod
    def read(cls, text: str) -> "EncryptionNote":
        """Decode a note; a text that is not valid gives the default note."""
        try:
            found = json.loads(text)
            return cls(str(found["key"]), bool(found["has_plain"]))
        except (ValueError, KeyError, TypeError):
            return cls()

    def text(self) -> str:
        """Encode the note."""
        return json.dumps({"key": self.key, "has_plain": self.has_plain})


@dataclass(frozen=True, slots=True)
class EncryptionInfo:
    """The state of encryption at rest, for operators.

    Attributes:
        key: fingerprint of the master key; "": there is none.
        is_sealing: whether new extents are encrypted.
        may_have_plain: whether there may be plain blocks on SSD, in used or free space.
        num_tenants: number of tenants that have a key.
    """

    key: str
    is_sealing: bool
    may_have_plain: bool
    num_tenants: int


class TenantSecrets:
    """Salts and keys of all tenants. Its methods are called on the event loop.

    Attributes:
        keys: keys that seal and open extents; None: there is no key file.
        note: the index's note on encryption.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._salts: dict[str, bytes] = {}  # tenant → salt, where there is no key file
        self.keys: Keyring | None = None
        self.note = EncryptionNote()

    def open(self, settings: EncryptionSettings, volumes: Path) -> None:
        """Read all secrets from the index; called before anything else.

        Args:
            settings: name the key file.
            volumes: directory of the volumes, which may be from a time without a key.

        Raises:
            KeyFileError: the key file cannot be read.
            KeyNeededError: there are wrapped secrets, but no key file.
            WrongKeyError: the key is not the one that wraps the secrets.
        """
        wrapped = self._manifest.tenant_keys()
        note = EncryptionNote.read(self._manifest.meta(META_NAME))
        if settings.key_file:
            keys = Keyring(read_key(settings.key_file), is_sealing=settings.enabled)
            self._open_keys(keys, wrapped, note, settings.key_file)
            was_plain = note.has_plain if note.key else self._may_have_plain(volumes)
            self._write_note(EncryptionNote(keys.fingerprint, was_plain or not settings.enabled))
            return
        if wrapped:
            raise KeyNeededError(
                f"{len(wrapped)} tenants have encrypted blocks, but encryption.key_file is not set",
                "set it (and encryption.enabled = false to encrypt nothing new); if the key is "
                "lost, set another state_dir",
            )
        self._salts = self._manifest.salts()
        if note.key:
            self._write_note(EncryptionNote())  # without a key new extents are plain

    def salt_of(self, tenant: str, max_tenants: int) -> bytes:
        """Return a tenant's secret salt; create and store it at the tenant's first block.

        Raises:
            LimitReachedError: `max_tenants` tenants have a salt already.
        """
        if self.keys is None:
            if tenant not in self._salts:
                self._check_room(len(self._salts), max_tenants)
                self._salts[tenant] = secrets.token_bytes(SALT_BYTES)
                self._manifest.put_salt(tenant, self._salts[tenant])
            return self._salts[tenant]
        if tenant not in self.keys:
            self._check_room(len(self.keys.tenants), max_tenants)
            self._manifest.put_tenant_key(tenant, self.keys.create(tenant))
        return self.keys.salt_of(tenant)

    def info(self) -> EncryptionInfo:
        """Return the state of encryption at rest, for operators."""
        keys = self.keys
        if keys is None:
            return EncryptionInfo("", is_sealing=False, may_have_plain=True, num_tenants=0)
        return EncryptionInfo(
            keys.fingerprint, keys.is_sealing, self.note.has_plain, len(keys.tenants)
        )

    def drop(self, tenants: Iterable[str], on_commit: Callable[[], object]) -> None:
        """Forget tenants' secrets, and delete them from the index.

        Args:
            tenants: names of the tenants.
            on_commit: called by another thread once no file has the secrets any more.
        """
        assert self.keys is not None, "there are keys to drop"  # noqa: S101
        dropped = tuple(tenants)
        for tenant in dropped:
            self.keys.forget(tenant)
        self._manifest.drop_tenant_keys(dropped, on_commit)

    def record_no_plain(self) -> None:
        """Record that SSD has no plain blocks, if new blocks are sealed."""
        if self.keys is not None and self.keys.is_sealing:
            self._write_note(EncryptionNote(self.keys.fingerprint, has_plain=False))

    def _open_keys(
        self, keys: Keyring, wrapped: dict[str, bytes], note: EncryptionNote, key_file: str
    ) -> None:
        damaged = [tenant for tenant, secret in wrapped.items() if not keys.adopt(tenant, secret)]
        is_wrong = note.key != keys.fingerprint if note.key else not keys.tenants
        if wrapped and is_wrong:
            raise WrongKeyError(
                f"the key in {key_file} ({keys.fingerprint[:8]}) is not the one that this state "
                f"directory is encrypted with ({note.key[:8] or 'not known'})",
                "set encryption.key_file to the file with that key, or change keys with: kvd key "
                "rotate",
            )
        for tenant in damaged:
            log.error("tenant_key_damaged", tenant=tenant)
        self.keys = keys
        self._manifest.zero_removed()
        salts = self._manifest.salts()
        for tenant, salt in salts.items():
            secret = wrapped[tenant] if tenant in keys else keys.create(tenant, salt)
            self._manifest.put_tenant_key(tenant, secret)
        self._manifest.purge()  # plain salts, and rows whose purge a kill has prevented

    def _write_note(self, note: EncryptionNote) -> None:
        self.note = note
        self._manifest.put_meta(META_NAME, note.text())

    def _may_have_plain(self, volumes: Path) -> bool:
        """Whether there may be blocks from a time without a key; their disk may be missing."""
        return has_segments(volumes) or self._manifest.has_blocks()

    def _check_room(self, num_tenants: int, max_tenants: int) -> None:
        if num_tenants >= max_tenants:
            raise LimitReachedError(
                f"{num_tenants} tenants have a salt, and no more are allowed",
                "raise limits.max_tenants",
            )


def has_segments(volumes: Path) -> bool:
    """Whether there is a segment of any volume; volumes set aside are included."""
    return any(volumes.glob("*/*.segment"))


def rotate_master_key(
    path: Path, volumes: Path, before: SecretKey, after: SecretKey, faults: Faults
) -> int:
    """Wrap all secrets of an index with another master key.

    Args:
        path: path of the database, which no kvd may have open.
        volumes: directory of the volumes, see open_database().
        before: the old key.
        after: the new key.
        faults: faults that tests inject, see kvd/tiers/faults.py.

    Returns:
        The number of secrets.

    Raises:
        KeyFileError: there is no index.
        WrongKeyError: `before` does not wrap the secrets; nothing was changed.
        NotDurableError: the transaction failed; nothing was changed.
    """
    if not path.exists():
        raise KeyFileError(
            f"the state directory has no {path}", "give the state directory of kvd with --state-dir"
        )
    with closing(open_database(path, volumes, faults)) as db:
        found = db.execute("SELECT value FROM meta WHERE name = ?", (META_NAME,)).fetchone()
        note = EncryptionNote.read(found[0] if found else "")
        stored = db.execute("SELECT tenant, wrapped FROM tenant_keys").fetchall()
        wrapped = [
            (wrap_secret(after, tenant, opened), tenant)
            for tenant, secret in stored
            if (opened := open_secret(before, tenant, secret)) is not None
        ]
        is_wrong = note.key != before.fingerprint if note.key else not wrapped
        if stored and is_wrong:
            raise WrongKeyError(
                f"the old key ({before.fingerprint[:8]}) is not the one that wraps the tenants' "
                f"keys ({note.key[:8] or 'not known'})",
                "give the file with that key with --old",
            )
        try:
            _rewrap(db, wrapped, EncryptionNote(after.fingerprint, note.has_plain), faults)
        except sqlite3.Error as error:
            raise NotDurableError(
                f"the new keys could not be saved in the index ({error})",
                "free some space, and try again",
            ) from error
    return len(wrapped)


def _rewrap(
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
