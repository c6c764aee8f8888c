"""Tenants' salts and keys: kept in the index, wrapped with the key file's key."""

import json
import threading
from contextlib import contextmanager

import pytest

from kvd.caches.layout_opening import VOLUMES
from kvd.caches.tenant_secrets import (
    META_NAME,
    EncryptionNote,
    TenantSecrets,
    has_segments,
    rotate_master_key,
)
from kvd.config import EncryptionSettings
from kvd.encryption.keyring import KeyNeededError, WrongKeyError
from kvd.errors import LimitReachedError
from kvd.tiers.faults import NoFaults
from kvd.tiers.manifest import Manifest
from shared.encryption.key_file import (
    KeyFileError,
    new_key,
    read_key,
    write_key,
)

DEADLINE_S = 30.0
MANY = 100


@pytest.fixture
def directory(tmp_path):
    (tmp_path / VOLUMES).mkdir()
    return tmp_path


@pytest.fixture
def key_file(tmp_path):
    return key_in(tmp_path / "key")


def key_in(path):
    write_key(path, new_key())
    return str(path)


@contextmanager
def secrets_in(directory, key_file="", *, enabled=True):
    """Open secrets as a start does; close the index at the end, so that all is committed."""
    manifest = Manifest(directory / "manifest.db", directory / VOLUMES, NoFaults())
    manifest.open()
    try:
        made = TenantSecrets(manifest)
        made.open(EncryptionSettings(key_file=key_file, enabled=enabled), directory / VOLUMES)
        yield made
    finally:
        manifest.close()


def test_salts_are_created_once_and_kept(directory):
    """A tenant's block keys are the same after a restart; two tenants share none."""
    with secrets_in(directory) as secrets:
        salts = [secrets.salt_of(tenant, MANY) for tenant in ("a", "b", "a")]
    assert salts[0] == salts[2] != salts[1]
    with secrets_in(directory) as secrets:
        assert [secrets.salt_of(tenant, MANY) for tenant in ("a", "b")] == salts[:2]
        assert secrets.info().is_sealing is False


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_tenants_are_bounded_and_known_ones_always_have_room(directory, key_file, is_encrypted):
    """Callers that may name tenants must not fill the index with them."""
    with secrets_in(directory, key_file if is_encrypted else "") as secrets:
        first = secrets.salt_of("a", 1)
        with pytest.raises(LimitReachedError, match="max_tenants"):
            secrets.salt_of("b", 1)
        assert secrets.salt_of("a", 1) == first


def test_plain_salts_are_adopted_with_a_key(directory, key_file):
    """Stored sessions are still found; no plain salt is left."""
    with secrets_in(directory) as secrets:
        salt = secrets.salt_of("a", MANY)
    with secrets_in(directory, key_file) as secrets:
        assert secrets.salt_of("a", MANY) == salt
        assert secrets.info().num_tenants == 1
    assert salt not in b"".join(path.read_bytes() for path in directory.glob("manifest.db*"))


def test_without_its_key_no_secret_opens(directory, key_file, tmp_path):
    """Neither without one nor with another one; both leave the index as it is."""
    with secrets_in(directory, key_file) as secrets:
        salt = secrets.salt_of("a", MANY)
    with pytest.raises(KeyNeededError), secrets_in(directory):
        pass
    with pytest.raises(WrongKeyError), secrets_in(directory, key_in(tmp_path / "other")):
        pass
    with secrets_in(directory, key_file) as secrets:
        assert secrets.salt_of("a", MANY) == salt


def test_a_new_directory_has_no_plain_blocks_and_an_older_one_may(directory, key_file):
    """Only this note says whether a segment may be from a time without a key."""
    with secrets_in(directory, key_file) as secrets:
        assert not secrets.info().may_have_plain
    segment = directory / VOLUMES / "layout" / "000000.segment"
    segment.parent.mkdir()
    segment.touch()
    assert has_segments(directory / VOLUMES)
    with secrets_in(directory, key_file) as secrets:
        assert not secrets.info().may_have_plain, "noted when the key came"
    with secrets_in(directory, key_file, enabled=False) as secrets:
        assert secrets.info().may_have_plain, "what is written now is plain"
        assert not secrets.info().is_sealing
    with secrets_in(directory, key_file) as secrets:
        assert secrets.info().may_have_plain, "and is not forgotten"
        secrets.record_no_plain()
    with secrets_in(directory, key_file) as secrets:
        assert not secrets.info().may_have_plain


def test_a_dropped_tenant_gets_a_new_salt_and_key(directory, key_file):
    """Once that is committed, the old ones exist nowhere."""
    with secrets_in(directory, key_file) as secrets:
        salt, key = secrets.salt_of("a", MANY), secrets.keys.key_of("a")
        kept = secrets.salt_of("b", MANY)
        committed = threading.Event()
        secrets.drop(["a"], committed.set)
        assert committed.wait(DEADLINE_S)
        assert secrets.salt_of("a", MANY) != salt
        assert secrets.keys.key_of("a") != key
        assert secrets.salt_of("b", MANY) == kept


def test_another_key_file_wraps_the_same_secrets(directory, key_file, tmp_path):
    """Sealed blocks stay as they are; the old key opens nothing."""
    with secrets_in(directory, key_file) as secrets:
        salts = {tenant: secrets.salt_of(tenant, MANY) for tenant in ("a", "b")}
        before = secrets.keys.fingerprint
    new_file = key_in(tmp_path / "new")
    assert rotate(directory, key_file, new_file) == 2
    with secrets_in(directory, new_file) as secrets:
        assert {tenant: secrets.salt_of(tenant, MANY) for tenant in ("a", "b")} == salts
        assert secrets.keys.fingerprint != before
    with pytest.raises(WrongKeyError), secrets_in(directory, key_file):
        pass


def test_a_rotation_with_a_wrong_key_does_nothing(directory, key_file, tmp_path):
    """Nor does one without an index."""
    with secrets_in(directory, key_file) as secrets:
        salt = secrets.salt_of("a", MANY)
    other, new = key_in(tmp_path / "other"), key_in(tmp_path / "new")
    with pytest.raises(WrongKeyError, match="the old key"):
        rotate(directory, other, new)
    with secrets_in(directory, key_file) as secrets:
        assert secrets.salt_of("a", MANY) == salt
    with pytest.raises(KeyFileError, match="has no"):
        rotate(tmp_path / "nowhere", key_file, new)


def rotate(directory, before, after):
    return rotate_master_key(
        directory / "manifest.db",
        directory / VOLUMES,
        read_key(before),
        read_key(after),
        NoFaults(),
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": "k"}', "null"])
def test_a_damaged_note_is_ignored(text):
    """Plain blocks are possible then, and no key is known."""
    assert EncryptionNote.read(text) == EncryptionNote("", has_plain=True)
    note = EncryptionNote("k" * 32, has_plain=False)
    assert EncryptionNote.read(note.text()) == note
    assert json.loads(note.text()).keys() == {"key", "has_plain"}
    assert META_NAME == "encryption", "its name in the index, which releases share"
