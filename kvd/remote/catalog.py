"""The sessions of a remote store: their manifests, found, listed and replaced."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvd.remote.errors import DamagedRemoteError, NotPushedError, SeveralPushedError
from kvd.remote.manifest import damaged, dropped, fenced, manifest_bytes, read_manifest
from kvd.remote.names import (
    SESSIONS,
    place_of,
    session_place,
    sessions_named,
    tenant_sessions,
)
from shared.blobs.blob_store import BlobStore
from shared.blobs.errors import BlobDamagedError, OvertakenError
from shared.blobs.register import NOTHING, Register, Version, is_version
from shared.pb.kvd.v1 import kvd_pb2 as pb
from shared.types.session_key import SessionKey


@dataclass(frozen=True)
class Pushed:
    """A session as a store has it.

    Attributes:
        place: of its manifest.
        version: of its manifest.
        manifest: decoded.
    """

    place: str
    version: Version
    manifest: pb.SessionManifest


class Catalog:
    """See the module docstring.

    Args:
        store: of one or many servers.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    def read(self, place: str) -> Pushed | None:
        """Return what a place has, be it dropped; None if nothing.

        Raises:
            DamagedRemoteError: its manifest is not what was put there.
        """
        try:
            version = Register(self._store, place).read()
        except BlobDamagedError as error:
            raise damaged() from error
        if version is None:
            return None
        manifest = read_manifest(version.data)
        named = manifest.session
        key = SessionKey(named.tenant, named.model, named.session_id)
        if session_place(key) != place:
            raise DamagedRemoteError(
                f"the manifest in {place} is another session's", "push the session again"
            )
        return Pushed(place, version, manifest)

    def find(self, tenant: str, session_id: str, model: str = "") -> Pushed:
        """Return a session.

        Args:
            tenant: whose it is.
            session_id: its id.
            model: how the model's fingerprint begins; "": any.

        Raises:
            NotPushedError: it is not there.
            SeveralPushedError: it is, of several models.
        """
        places = self._places(sessions_named(tenant, session_id))
        read = [self.read(place) for place in sorted(places)]
        found = [
            one
            for one in read
            if one and not one.manifest.dropped and one.manifest.session.model.startswith(model)
        ]
        if not found:
            raise NotPushedError(
                f"the store has no session {session_id!r} of tenant {tenant!r}",
                "list what it has with: kvd remote ls",
            )
        if len(found) > 1:
            models = ", ".join(one.manifest.session.model[:12] for one in found)
            raise SeveralPushedError(
                f"the store has session {session_id!r} of several models ({models})",
                "name one with --model",
            )
        return found[0]

    def places(self, tenant: str = "") -> list[str]:
        """Return the places of all sessions, or of a tenant's, in a fixed order."""
        return sorted(self._places(tenant_sessions(tenant) if tenant else SESSIONS))

    def sessions(self, tenant: str = "") -> Iterator[Pushed]:
        """Yield all sessions that are not dropped, or those of a tenant."""
        for place in self.places(tenant):
            found = self.read(place)
            if found is not None and not found.manifest.dropped:
                yield found

    def replace(self, place: str, before: Pushed | None, manifest: pb.SessionManifest) -> None:
        """Put a manifest in place of the one that was read: from now on it counts.

        Raises:
            FencedError: another server has become the owner meanwhile.
            OvertakenError: it was replaced otherwise.
        """
        seen = NOTHING if before is None else before.version.seen
        try:
            Register(self._store, place).replace(seen, manifest_bytes(manifest))
        except OvertakenError:
            now = self.read(place)
            if now is not None and now.manifest.owner != manifest.owner:
                raise fenced(now.manifest) from None
            raise

    def drop(self, found: Pushed) -> None:
        """Drop a session; its chunks are left to a sweep."""
        self.replace(found.place, found, dropped(found.manifest))

    def forget(self, found: Pushed) -> None:
        """Remove what stands for a session that was dropped long ago."""
        Register(self._store, found.place).remove(found.version.seen)

    def _places(self, prefix: str) -> set[str]:
        pages = self._store.list(f"{prefix}/")
        return {place_of(blob.name) for page in pages for blob in page if is_version(blob.name)}
