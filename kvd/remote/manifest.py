"""The manifest of a session (version 2): its chunks, its owner, and how long it is kept. Pure.

    manifest = magic "KVDREMOT" | version u32 | bytes of the body u32 | xxh3_64 | body

The body is a kvd.v1.SessionManifest. The checksum is of the bytes before it and of the body.
Little-endian.
"""

import secrets
import struct
from dataclasses import dataclass

import xxhash
from google.protobuf.message import DecodeError

from kvd.remote.errors import DamagedRemoteError, FencedError
from shared.blobs.blob_store import UnfitStoreError
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.errors import InvalidInputError
from shared.types.session_key import SessionKey, session_key

MAGIC = b"KVDREMOT"
VERSION = 2
VERSIONS = (1, VERSION)  # that can be read: version 1 names its chunks by SHA-256
_START = struct.Struct("<8sII")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True)
class Owner:
    """A server, as manifests name their owner.

    Attributes:
        server_id: the id of its kvd.
        name: its name for people.
    """

    server_id: str
    name: str


def manifest_bytes(manifest: pb.SessionManifest) -> bytes:
    """Encode a manifest, with a nonce: no two encoded manifests are the same."""
    manifest.written_by = secrets.token_hex(8)
    body = manifest.SerializeToString()
    start = _START.pack(MAGIC, VERSION, len(body))
    return start + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(start + body)) + body


def read_manifest(data: bytes) -> pb.SessionManifest:
    """Decode a manifest.

    Raises:
        DamagedRemoteError: the bytes are damaged, or no manifest.
        UnfitStoreError: another release wrote it.
    """
    head = _START.size + _CHECKSUM.size
    if len(data) < head or data[: len(MAGIC)] != MAGIC:
        raise damaged_error()
    _, version, num_bytes = _START.unpack_from(data)
    if version not in VERSIONS:
        raise UnfitStoreError(
            f"the manifest has version {version}, but this release knows only {VERSION}",
            "use the release that wrote it",
        )
    (checksum,) = _CHECKSUM.unpack_from(data, _START.size)
    body = data[head:]
    if len(body) != num_bytes or xxhash.xxh3_64_intdigest(data[: _START.size] + body) != checksum:
        raise damaged_error()
    try:
        manifest = pb.SessionManifest.FromString(body)
        key_of(manifest)
    except (DecodeError, InvalidInputError) as error:
        raise damaged_error() from error
    return manifest


def key_of(manifest: pb.SessionManifest) -> SessionKey:
    """Return the session that a manifest describes."""
    named = manifest.session
    return session_key(named.tenant, named.model, named.session_id)


def make_manifest(
    info: pb.SessionInfo,
    before: pb.SessionManifest | None,
    owner: Owner,
    seen_unix_s: float,
    *,
    takes: bool,
) -> pb.SessionManifest:
    """Return the manifest, still without content, of a session that its server is about to push.

    Args:
        info: the session.
        before: the manifest in the store; None: there is none.
        owner: the server that pushes.
        seen_unix_s: when it began to read the session, by its clock.
        takes: take the session over if another server owns it.

    Raises:
        FencedError: another server owns it, and it is not to be taken over.
    """
    lives = before is not None and not before.dropped
    is_others = before is not None and lives and before.owner != owner.server_id
    if before is not None and is_others and not takes:
        raise fenced_error(before)
    epoch = 0 if before is None else before.epoch
    return pb.SessionManifest(
        session=info.session,
        epoch=epoch if lives and not is_others else epoch + 1,
        owner=owner.server_id,
        owner_name=owner.name,
        expires_after_s=info.expires_in_s,
        ttl_s=info.ttl_s,
        pin=info.pin,
        retain_s=info.retain_s,
        seen_unix_s=seen_unix_s,
    )


def with_owner(before: pb.SessionManifest, owner: Owner) -> pb.SessionManifest:
    """Return the manifest of the same content under another owner."""
    manifest = pb.SessionManifest()
    manifest.CopyFrom(before)
    manifest.epoch += 1
    manifest.owner, manifest.owner_name = owner.server_id, owner.name
    return manifest


def tombstone(before: pb.SessionManifest) -> pb.SessionManifest:
    """Return the manifest that replaces a dropped session's, so that late writers find it."""
    return pb.SessionManifest(
        session=before.session,
        epoch=before.epoch,
        owner=before.owner,
        owner_name=before.owner_name,
        dropped=True,
    )


def is_unchanged(before: pb.SessionManifest | None, info: pb.SessionInfo, now_s: float) -> bool:
    """Return whether its owner has nothing new to push: same terms, and unused since the last push.

    Args:
        before: the session's manifest, of this owner.
        info: the session now.
        now_s: the server's clock (unix).
    """
    if before is None or before.dropped:
        return False
    terms = (before.num_tokens, before.ttl_s, before.pin, before.retain_s)
    is_same = terms == (info.num_tokens, info.ttl_s, info.pin, info.retain_s)
    return is_same and now_s - info.idle_s < before.seen_unix_s


def is_remnant(before: pb.SessionManifest, info: pb.SessionInfo) -> bool:
    """Return whether a server has less of a session than the store, as it lost the last tokens."""
    return not before.dropped and bool(info.lost) and info.num_tokens < before.num_tokens


def objects_of(manifest: pb.SessionManifest) -> list[pb.RemoteChunk]:
    """Return all objects that a manifest names: the chunks, and the token ids."""
    token_ids = [manifest.token_ids] if manifest.HasField("token_ids") else []
    return [*manifest.chunks, *token_ids]


def has_expired(manifest: pb.SessionManifest, age_s: float) -> bool:
    """Return whether a session has expired, `age_s` after its manifest was stored."""
    return not manifest.dropped and 0 <= manifest.expires_after_s <= age_s


def fenced_error(manifest: pb.SessionManifest) -> FencedError:
    """Return the error that another server owns a session."""
    return FencedError(
        f"session {manifest.session.session_id!r} belongs to server "
        f"{manifest.owner_name}, since epoch {manifest.epoch}",
        "pull it from there, or add --take to push it all the same",
        details={
            "owner": manifest.owner_name,
            "epoch": str(manifest.epoch),
            "num_tokens": str(manifest.num_tokens),
        },
    )


def damaged_error() -> DamagedRemoteError:
    """Return the error that the bytes of a manifest are not those that were put."""
    return DamagedRemoteError(
        "a manifest in the object store is damaged", "push the session again with --take"
    )
