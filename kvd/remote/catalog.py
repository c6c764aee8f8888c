"""The catalog of a remote store: finds, lists and replaces manifests of sessions."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvd.remote.errors import DamagedRemoteError, NotPushedError, SeveralPushedError
from kvd.remote.manifest import (
    damaged_error,
    fenced_error,
    manifest_bytes,
    read_manifest,
    tombstone,
)
from kvd.remote.names import (
    SESSIONS,
    place_of,
    session_place,
    sessions_named,
    tenant_sessions,
)
from shared.blobs.blob_store import BlobDamagedError, BlobStore, OvertakenError
from shared.blobs.register import NOTHING, Register, Version, is_version
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class PushedSession:
    """A session in a remote store.

    Attributes:
        place: the place of its manifest's versions.
        version: the version that was read.
        manifest: the decoded manifest.
    """

    place: str
    version: Version
    manifest: pb.SessionManifest


@dataclass(frozen=True)
class Listed:
    """The sessions at some places of a remote store.

    Attributes:
        sessions: those that are not dropped.
        damaged: tombstones in place of manifests that cannot be read.
    """

    sessions: list[PushedSession]
    damaged: list[PushedSession]


class Catalog:
    """Reads and replaces manifests in one store.

    Args:
        store: the store; many servers may share it.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    def read(self, place: str) -> PushedSession | None:
        """Return the session of a place, even if it is dropped; None: there is none.

        Raises:
            DamagedRemoteError: its manifest is damaged, or another session's.
        """
        try:
            version = Register(self._store, place).read()
        except BlobDamagedError as error:
            raise damaged_error() from error
        if version is None:
            return None
        manifest = read_manifest(version.data)
        named = manifest.session
        key = SessionKey(named.tenant, named.model, named.session_id)
        if session_place(key) != place:
            raise DamagedRemoteError(
                f"the manifest in {place} belongs to another session", "push the session again"
            )
        return PushedSession(place, version, manifest)

    def damaged(self, place: str) -> PushedSession:
        """Return a tombstone in place of a manifest that cannot be read, to replace or forget it.

        Its epoch is not below that of the manifest: each epoch has taken a version of its own.
        """
        seen = Register(self._store, place).look()
        manifest = pb.SessionManifest(epoch=seen.number, dropped=True)
        return PushedSession(place, Version(seen, b"", 0.0), manifest)

    def find(self, tenant: str, session_id: str, model: str = "") -> PushedSession:
        """Return the session of an id.

        Args:
            tenant: the session's tenant.
            session_id: its id.
            model: the beginning of its model's fingerprint; "": any.

        Raises:
            NotPushedError: there is none.
            SeveralPushedError: there are some, of several models.
        """
        places = self._places(sessions_named(tenant, session_id))
        read = [self.read(place) for place in sorted(places)]
        found = [
            pushed
            for pushed in read
            if pushed
            and not pushed.manifest.dropped
            and pushed.manifest.session.model.startswith(model)
        ]
        if not found:
            raise NotPushedError(
                f"the object store has no session {session_id!r} of tenant {tenant!r}",
                "list what it has with: kvd remote ls",
            )
        if len(found) > 1:
            models = ", ".join(pushed.manifest.session.model[:12] for pushed in found)
            raise SeveralPushedError(
                f"the object store has session {session_id!r} for several models ({models})",
                "choose one with --model",
            )
        return found[0]

    def places(self, tenant: str = "") -> list[str]:
        """Return the places of all sessions, or of a tenant's, in a fixed order."""
        return sorted(self._places(tenant_sessions(tenant) if tenant else SESSIONS))

    def sessions(self, tenant: str = "") -> Listed:
        """Return all sessions, or those of a tenant."""
        return self._listed(self.places(tenant))

    def sessions_of(self, tenant: str, session_id: str) -> Listed:
        """Return the sessions of an id, one for each model."""
        return self._listed(sorted(self._places(sessions_named(tenant, session_id))))

    def replace(
        self, place: str, before: PushedSession | None, manifest: pb.SessionManifest
    ) -> None:
        """Put a manifest in place of the one that was read. From now on it is valid.

        Raises:
            FencedError: another server has become the owner meanwhile.
            OvertakenError: the same owner has replaced it meanwhile.
        """
        seen = NOTHING if before is None else before.version.seen
        try:
            Register(self._store, place).replace(seen, manifest_bytes(manifest))
        except OvertakenError:
            now = self.read(place)
            if now is not None and now.manifest.owner != manifest.owner:
                raise fenced_error(now.manifest) from None
            raise

    def drop(self, found: PushedSession) -> None:
        """Drop a session. Its chunks stay until a sweep removes them."""
        self.replace(found.place, found, tombstone(found.manifest))

    def forget(self, found: PushedSession) -> None:
        """Remove the tombstone of a session that was dropped long ago, or a damaged manifest."""
        Register(self._store, found.place).remove(found.version.seen)

    def _listed(self, places: Iterable[str]) -> Listed:
        listed = Listed([], [])
        for place in places:
            try:
                found = self.read(place)
            except DamagedRemoteError:
                listed.damaged.append(self.damaged(place))
                continue
            if found is not None and not found.manifest.dropped:
                listed.sessions.append(found)
        return listed

    def _places(self, prefix: str) -> set[str]:
        pages = self._store.list(f"{prefix}/")
        return {place_of(blob.name) for page in pages for blob in page if is_version(blob.name)}
