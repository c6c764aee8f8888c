"""Tenants' secrets: wrapped for one master key and one tenant."""

import pytest

from kvd.encryption.keyring import Keyring, open_secret
from shared.encryption.key_file import (
    new_key,
)
from shared.encryption.sealing import key_id


@pytest.fixture
def master():
    return new_key()


@pytest.fixture
def keys(master):
    return Keyring(master, is_sealing=True)


def test_a_secret_opens_only_for_its_tenant_and_master_key(master, keys):
    """Not under another tenant's name, with another master key, or with a bit changed."""
    wrapped = keys.create("a")
    again = Keyring(master, is_sealing=True)
    assert again.adopt("a", wrapped)
    assert (again.key_of("a"), again.salt_of("a")) == (keys.key_of("a"), keys.salt_of("a"))
    assert not again.adopt("b", wrapped)
    assert open_secret(new_key(), "a", wrapped) is None
    for index in range(0, len(wrapped), 7):
        damaged = bytearray(wrapped)
        damaged[index] ^= 1
        assert open_secret(master, "a", bytes(damaged)) is None
    assert open_secret(master, "a", b"") is None


def test_secrets_are_all_different(keys):
    """Two tenants, and one tenant after it was forgotten, share neither key nor salt."""
    keys.create("a")
    keys.create("b")
    first = keys.key_of("a"), keys.salt_of("a")
    keys.forget("a")
    assert "a" not in keys
    assert keys.find_key(key_id(first[0])) is None
    keys.create("a")
    values = {*first, keys.key_of("a"), keys.salt_of("a"), keys.key_of("b"), keys.salt_of("b")}
    assert len(values) == 6


def test_an_existing_salt_is_kept(keys):
    """Block keys of a tenant that had a plain salt do not change."""
    keys.create("a", b"s" * 32)
    assert keys.salt_of("a") == b"s" * 32


def test_secrets_are_not_printed(master, keys):
    """Keys that are logged by accident show no secret."""
    secret = open_secret(master, "a", keys.create("a"))
    assert secret is not None
    for shown in (repr(master), repr(secret), repr(keys)):
        for value in (master.key, secret.key, secret.salt):
            assert repr(value)[2:-1] not in shown
            assert value.hex() not in shown
