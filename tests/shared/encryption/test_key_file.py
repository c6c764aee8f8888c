"""Key files: private, and complete."""

import pytest

from shared.encryption.key_file import (
    CREDENTIALS_ENV,
    KeyFileError,
    SecretKey,
    new_key,
    read_key,
    write_key,
)


@pytest.fixture
def key():
    return new_key()


def test_a_key_file_is_private_and_read_again(tmp_path, key):
    """Only its owner may read it, and it is never overwritten."""
    path = tmp_path / "key"
    write_key(path, key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(str(path)) == key
    with pytest.raises(KeyFileError, match="exists"):
        write_key(path, new_key())
    assert read_key(str(path)) == key
    with pytest.raises(KeyFileError, match="directory"):
        write_key(tmp_path / "nowhere" / "key", key)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620])
def test_a_key_file_with_other_permissions_is_refused(tmp_path, key, mode):
    """Its group may read it if the settings allow; others have no access."""
    path = tmp_path / "key"
    write_key(path, key)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_key(str(path))
    path.chmod(0o640)
    assert read_key(str(path)) == key


@pytest.mark.parametrize(
    "text", [b"", b"ab" * 31, b"ab" * 33, b"x" * 64, b"\xff" * 64, b"a" * 9000]
)
def test_a_file_without_a_key_is_refused(tmp_path, text):
    """The error names the file, and a remedy, without the file's contents."""
    path = tmp_path / "key"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="kvd key new") as refused:
        read_key(str(path))
    assert text.decode("latin-1") not in str(refused.value) or not text


def test_a_missing_key_file_is_refused(tmp_path):
    """With the command that creates one."""
    with pytest.raises(KeyFileError, match="kvd key new"):
        read_key(str(tmp_path / "key"))


def test_a_bare_name_is_a_systemd_credential(tmp_path, monkeypatch, key):
    """Its modes are systemd's own."""
    monkeypatch.delenv(CREDENTIALS_ENV, raising=False)
    with pytest.raises(KeyFileError, match="LoadCredential"):
        read_key("kvd-key")
    monkeypatch.setenv(CREDENTIALS_ENV, str(tmp_path))
    (tmp_path / "kvd-key").write_text(key.key.hex())
    (tmp_path / "kvd-key").chmod(0o444)
    assert read_key("kvd-key") == SecretKey(key.key)
