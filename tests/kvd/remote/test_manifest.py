"""Manifests: read as written or not at all; owners of sessions, and expiry."""

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


def _make_manifest(
    before: pb.SessionManifest | None = None, owner: Owner = ONE, *, takes: bool = False
) -> pb.SessionManifest:
    manifest = make_manifest(INFO, before, owner, 1000.0, takes=takes)
    manifest.num_tokens = INFO.num_tokens
    return manifest


def test_a_manifest_round_trips() -> None:
    """Each is different from every other, so that a writer recognises its own."""
    manifest = _make_manifest()
    data = manifest_bytes(manifest)
    assert read_manifest(data) == manifest
    assert (manifest.pin, manifest.ttl_s, manifest.retain_s) == (pb.PIN_SOFT, 3600.0, 60.0)
    assert manifest_bytes(manifest) != data


def test_damage_is_detected_everywhere() -> None:
    """No byte may change, none may be missing."""
    data = manifest_bytes(_make_manifest())
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


def test_the_epoch_changes_with_the_owner() -> None:
    """The same owner keeps it; another owner, or a dropped session, increments it."""
    first = _make_manifest()
    assert (first.epoch, _make_manifest(first).epoch) == (1, 1)
    second = with_owner(first, TWO)
    assert (second.epoch, second.owner_name, second.num_tokens) == (2, "gpu-2", 100)
    with pytest.raises(FencedError, match="belongs to server gpu-2, since epoch 2") as fenced:
        _make_manifest(second)
    assert (fenced.value.exit_code, fenced.value.retryable) == (4, False)
    third = _make_manifest(second, takes=True)
    assert (third.epoch, third.owner) == (3, ONE.server_id)
    gone = tombstone(third)
    assert (gone.dropped, gone.chunks, gone.epoch) == (True, [], 3)
    assert _make_manifest(gone, TWO).epoch == 4


def test_a_manifest_expires_after_it_was_stored() -> None:
    """One without a TTL never does; a dropped one has expired."""
    manifest = _make_manifest()
    assert (has_expired(manifest, 3589.0), has_expired(manifest, 3590.0)) == (False, True)
    assert not has_expired(tombstone(manifest), 9999.0)
    manifest.expires_after_s = -1.0
    assert not has_expired(manifest, 1e9)


def test_a_used_or_changed_session_is_not_unchanged() -> None:
    """Only the session as it was, with the same settings, and unused since."""
    manifest = _make_manifest()
    assert is_unchanged(manifest, INFO, 1005.0)
    assert not is_unchanged(manifest, INFO, 1011.0)  # used a second after it was pushed
    assert not is_unchanged(None, INFO, 1005.0)
    assert not is_unchanged(tombstone(manifest), INFO, 1005.0)
    for field, value in (("num_tokens", 101), ("ttl_s", 1.0), ("pin", 0), ("retain_s", 0.0)):
        other = pb.SessionInfo()
        other.CopyFrom(INFO)
        setattr(other, field, value)
        assert not is_unchanged(manifest, other, 1005.0)
