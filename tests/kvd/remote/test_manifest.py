"""Manifests: read as they were written or not at all; whose a session is, and how long."""

import pytest

from kvd.remote.errors import DamagedRemoteError, FencedError
from kvd.remote.manifest import (
    Owner,
    has_expired,
    is_unchanged,
    make_manifest,
    manifest_bytes,
    read_manifest,
    tombstone,
    with_owner,
)
from shared.blobs.blob_store import UnfitStoreError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.synthetic_engine import key_of

ONE, TWO = Owner("1111", "gpu-1"), Owner("2222", "gpu-2")
KEY = key_of("a")
INFO = pb.SessionInfo(
    session=pb.SessionKey(tenant=KEY.tenant, model=KEY.model, session_id=KEY.session_id),
    num_tokens=100,
    idle_s=10.0,
    ttl_s=3600.0,
    expires_in_s=3590.0,
    pin=pb.PIN_SOFT,
    retain_s=60.0,
)


def _pushed(
    before: pb.SessionManifest | None = None, owner: Owner = ONE, *, takes: bool = False
) -> pb.SessionManifest:
    manifest = make_manifest(INFO, before, owner, 1000.0, takes=takes)
    manifest.num_tokens = INFO.num_tokens
    return manifest


def test_it_is_read_as_it_was_written() -> None:
    """Each is unlike every other, so that a writer knows its own."""
    manifest = _pushed()
    data = manifest_bytes(manifest)
    assert read_manifest(data) == manifest
    assert (manifest.pin, manifest.ttl_s, manifest.retain_s) == (pb.PIN_SOFT, 3600.0, 60.0)
    assert manifest_bytes(manifest) != data


def test_damage_is_found_wherever_it_is() -> None:
    """No byte may change, none may be missing."""
    data = manifest_bytes(_pushed())
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x40
        with pytest.raises((DamagedRemoteError, UnfitStoreError)):
            read_manifest(bytes(changed))
        with pytest.raises(DamagedRemoteError):
            read_manifest(data[:at])
    with pytest.raises(DamagedRemoteError):
        read_manifest(data + b"x")
    later = data[:8] + b"\3" + data[9:]
    with pytest.raises(UnfitStoreError, match="version 3"):
        read_manifest(later)


def test_the_epoch_follows_the_owner() -> None:
    """The same owner keeps it; a change of the owner, and what was dropped, raise it."""
    first = _pushed()
    assert (first.epoch, _pushed(first).epoch) == (1, 1)
    second = with_owner(first, TWO)
    assert (second.epoch, second.owner_name, second.num_tokens) == (2, "gpu-2", 100)
    with pytest.raises(FencedError, match="belongs to server gpu-2, since epoch 2") as fenced:
        _pushed(second)
    assert (fenced.value.exit_code, fenced.value.retryable) == (4, False)
    third = _pushed(second, takes=True)
    assert (third.epoch, third.owner) == (3, ONE.server_id)
    gone = tombstone(third)
    assert (gone.dropped, gone.chunks, gone.epoch) == (True, [], 3)
    assert _pushed(gone, TWO).epoch == 4


def test_it_expires_so_long_after_it_was_stored() -> None:
    """One without end never does; one that was dropped is gone already."""
    manifest = _pushed()
    assert (has_expired(manifest, 3589.0), has_expired(manifest, 3590.0)) == (False, True)
    assert not has_expired(tombstone(manifest), 9999.0)
    manifest.expires_after_s = -1.0
    assert not has_expired(manifest, 1e9)


def test_what_was_used_or_changed_is_not_unchanged() -> None:
    """Only the session as it was, on the same terms, and left alone since."""
    manifest = _pushed()
    assert is_unchanged(manifest, INFO, 1005.0)
    assert not is_unchanged(manifest, INFO, 1011.0)  # used a second after it was pushed
    assert not is_unchanged(None, INFO, 1005.0)
    assert not is_unchanged(tombstone(manifest), INFO, 1005.0)
    for field, value in (("num_tokens", 101), ("ttl_s", 1.0), ("pin", 0), ("retain_s", 0.0)):
        other = pb.SessionInfo()
        other.CopyFrom(INFO)
        setattr(other, field, value)
        assert not is_unchanged(manifest, other, 1005.0)
