"""Tenants' secrets: wrapped for one master key and one tenant; key files: private, and whole."""

import pytest

from kvd.encryption.key_file import (
    CREDENTIALS_ENV,
    KeyFileError,
    MasterKey,
    new_master_key,
    read_master_key,
    write_master_key,
)
from kvd.encryption.keyring import Keyring, open_secret
from kvd.encryption.sealing import TAG_BYTES, Seal, key_id, new_salt, unwrap, wrap


@pytest.fixture
def master():
    return new_master_key()


@pytest.fixture
def keys(master):
    return Keyring(master, is_sealing=True)


def test_a_secret_opens_for_its_tenant_and_master_only(master, keys):
    """Under another tenant's name, or another master key, it is nothing; nor with a bit changed."""
    wrapped = keys.make("a")
    again = Keyring(master, is_sealing=True)
    assert again.adopt("a", wrapped)
    assert (again.key_of("a"), again.salt_of("a")) == (keys.key_of("a"), keys.salt_of("a"))
    assert not again.adopt("b", wrapped)
    assert open_secret(new_master_key(), "a", wrapped) is None
    for index in range(0, len(wrapped), 7):
        damaged = bytearray(wrapped)
        damaged[index] ^= 1
        assert open_secret(master, "a", bytes(damaged)) is None
    assert open_secret(master, "a", b"") is None


def test_secrets_are_all_different(keys):
    """Two tenants, and one tenant after it was forgotten, share neither key nor salt."""
    keys.make("a")
    keys.make("b")
    first = keys.key_of("a"), keys.salt_of("a")
    keys.forget("a")
    assert "a" not in keys
    assert keys.key_named(key_id(first[0])) is None
    keys.make("a")
    values = {*first, keys.key_of("a"), keys.salt_of("a"), keys.key_of("b"), keys.salt_of("b")}
    assert len(values) == 6


def test_a_salt_that_is_there_is_kept(keys):
    """Block keys of a tenant that had a salt in plain stay what they are."""
    keys.make("a", b"s" * 32)
    assert keys.salt_of("a") == b"s" * 32


def test_secrets_do_not_show(master, keys):
    """What is logged of keys by accident has no secret in it."""
    secret = open_secret(master, "a", keys.make("a"))
    assert secret is not None
    for shown in (repr(master), repr(secret), repr(keys)):
        for value in (master.key, secret.key, secret.salt):
            assert repr(value)[2:-1] not in shown
            assert value.hex() not in shown


def test_parts_open_in_their_place_only():
    """A part is neither another part, nor of another thing, nor bound to anything else."""
    key, salt = b"k" * 32, new_salt()
    sealed = memoryview(bytearray(5 + TAG_BYTES))
    Seal(key, salt).seal_into(3, b"bytes", sealed, b"bound")
    assert Seal(key, salt).open(3, sealed, b"bound") == b"bytes"
    others = (
        Seal(key, salt).open(2, sealed, b"bound"),
        Seal(key, salt).open(3, sealed, b"other"),
        Seal(key, new_salt()).open(3, sealed, b"bound"),
        Seal(b"K" * 32, salt).open(3, sealed, b"bound"),
    )
    assert others == (None,) * 4
    assert unwrap(key, wrap(key, b"secret", b"x"), b"y") is None
    assert wrap(key, b"secret", b"x") != wrap(key, b"secret", b"x")


# ----------------------------------------------------------------------------------- key files


def test_a_key_file_is_private_and_read_again(tmp_path, master):
    """Only its owner may read it, it is never overwritten, and the key comes back."""
    path = tmp_path / "key"
    write_master_key(path, master)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_master_key(str(path)) == master
    with pytest.raises(KeyFileError, match="exists"):
        write_master_key(path, new_master_key())
    assert read_master_key(str(path)) == master
    with pytest.raises(KeyFileError, match="directory"):
        write_master_key(tmp_path / "nowhere" / "key", master)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_key_file_that_others_may_touch_is_refused(tmp_path, master, mode):
    """The group may read it, where the file says so; others may nothing."""
    path = tmp_path / "key"
    write_master_key(path, master)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_master_key(str(path))
    path.chmod(0o640)
    assert read_master_key(str(path)) == master


@pytest.mark.parametrize(
    "text", [b"", b"ab" * 31, b"ab" * 33, b"x" * 64, b"\xff" * 64, b"a" * 9000]
)
def test_a_file_without_a_key_is_refused(tmp_path, text):
    """Whatever is in it, the error names the file, and a remedy, and nothing of what is in it."""
    path = tmp_path / "key"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="kvd key new") as refused:
        read_master_key(str(path))
    assert text.decode("latin-1") not in str(refused.value) or not text


def test_a_missing_key_file_is_refused(tmp_path):
    """With how to make one."""
    with pytest.raises(KeyFileError, match="kvd key new"):
        read_master_key(str(tmp_path / "key"))


def test_a_name_is_that_of_a_credential(tmp_path, monkeypatch, master):
    """systemd puts it into a directory of its own, whose modes are its own business."""
    monkeypatch.delenv(CREDENTIALS_ENV, raising=False)
    with pytest.raises(KeyFileError, match="LoadCredential"):
        read_master_key("kvd-key")
    monkeypatch.setenv(CREDENTIALS_ENV, str(tmp_path))
    (tmp_path / "kvd-key").write_text(master.key.hex())
    (tmp_path / "kvd-key").chmod(0o444)
    assert read_master_key("kvd-key") == MasterKey(master.key)
