"""A sweep of a remote store: drops expired sessions, and removes chunks that no manifest names.

All ages are by the store's clock. A sweep removes nothing at once. An expired session becomes a
tombstone, which is removed GRACE_S later. Chunks are condemned first (chunk_store.py). So a sweep
is safe beside pushes, pulls and other sweeps; its lease only avoids double work. If a manifest
cannot be read, none of its tenant's chunks is removed, because it is not known what it names.

Of the services' objects a sweep removes: tombstones of transcripts and conversations; transcripts
of sessions that no client has named, and all histories and responses, once they have not been used
for a long time. A server that is gone would never delete these.
"""

import json
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from kvd.remote.catalog import Catalog
from kvd.remote.chunk_store import GRACE_S, condemned_list, condemned_names, list_blobs
from kvd.remote.errors import DamagedRemoteError, SweepRunningError
from kvd.remote.manifest import Owner, has_expired, objects_of
from kvd.remote.names import SWEEPER, all_chunks, all_condemned, place_of
from shared.blobs.blob_store import (
    Blob,
    BlobMissingError,
    BlobStore,
    OvertakenError,
    UnfitStoreError,
)
from shared.blobs.history_entry import decode_entry
from shared.blobs.register import NOTHING, Register, Seen, Version, is_version, number_of
from shared.blobs.release import (
    CONVERSATIONS,
    DELETED_BYTES,
    HISTORIES,
    RESPONSES,
    TRANSCRIPTS,
)
from shared.blobs.response_entry import decode_response

KNOWN_S = 30 * 86400.0  # by then every service has noticed a deletion, even one that was away
UNNAMED_S = 30 * 86400.0  # by then an unnamed session is unlikely to continue
LEASE_S = 900.0  # a sweep that takes longer continues, perhaps beside another one


@dataclass
class SweepResult:
    """The counts of one sweep.

    Attributes:
        num_sessions: sessions that are kept.
        num_expired: sessions that were dropped.
        num_forgotten: tombstones of sessions, transcripts and conversations that were removed.
        num_condemned: chunks that were condemned.
        num_removed: chunks that were removed.
        removed_bytes: bytes of these.
        num_damaged: manifests that cannot be read.
        num_unnamed: transcripts of unnamed sessions that were removed, as they were not used.
    """

    num_sessions: int = 0
    num_expired: int = 0
    num_forgotten: int = 0
    num_condemned: int = 0
    num_removed: int = 0
    removed_bytes: int = 0
    num_damaged: int = 0
    num_unnamed: int = 0


class Sweeper:
    """Sweeps one store.

    Args:
        store: the store.
        owner: the server that sweeps.
        clock: unix seconds, for the lease.
        unnamed_s: seconds without a turn after which an unnamed session's transcript is removed.
    """

    def __init__(
        self,
        store: BlobStore,
        owner: Owner,
        clock: Callable[[], float] = time.time,
        unnamed_s: float = UNNAMED_S,
    ) -> None:
        self._store = store
        self._catalog = Catalog(store)
        self._lease = Register(store, SWEEPER)
        self._owner = owner
        self._clock = clock
        self._unnamed_s = unnamed_s

    def sweep(self) -> SweepResult:
        """Sweep once.

        Raises:
            SweepRunningError: another sweep runs.
        """
        now_s = self._begin()
        result = SweepResult()
        try:
            named, unknown = self._sweep_sessions(now_s, result)
            self._sweep_chunks(now_s, named, unknown, result)
            self._sweep_deleted(now_s, result)
            self._sweep_answers(now_s, result)
        finally:
            self._end()
        return result

    # ---------------------------------------------------------------------------------- the lease

    def _begin(self) -> float:
        """Take the lease; return the store's time."""
        held = self._lease.read()
        holder = self._holder(held)
        if held is not None and holder and self._clock() < held.stored_unix_s + LEASE_S:
            raise SweepRunningError(
                f"{holder} is already sweeping the object store",
                f"wait until it has ended, {LEASE_S / 60:g} minutes at most",
            )
        try:
            seen = self._lease.replace(
                NOTHING if held is None else held.seen, self._note(self._owner.name)
            )
        except OvertakenError as error:
            raise SweepRunningError(
                "another sweep has just begun", "wait until it has ended"
            ) from error
        blob = self._store.find(self._lease.name_of(seen.number))
        if blob is None:
            raise SweepRunningError("another sweep has just begun", "wait until it has ended")
        return blob.stored_unix_s

    def _end(self) -> None:
        held = self._lease.read()
        if held is not None and self._holder(held) == self._owner.name:
            self._lease.replace(held.seen, self._note(""))

    def _note(self, holder: str) -> bytes:
        return json.dumps({"holder": holder, "nonce": secrets.token_hex(8)}).encode()

    def _holder(self, held: Version | None) -> str:
        try:
            return "" if held is None else str(json.loads(held.data)["holder"])
        except (ValueError, KeyError, TypeError):
            return ""  # damaged: it is free

    # -------------------------------------------------------------------------------- what is swept

    def _sweep_sessions(self, now_s: float, result: SweepResult) -> tuple[set[str], set[str]]:
        """Drop expired sessions, and remove old tombstones.

        Returns:
            Names of all chunks that manifests name, as TENANT/CHUNK; and the tenants of which not
            all manifests could be read.
        """
        named: set[str] = set()
        unknown: set[str] = set()
        for place in self._catalog.places():
            tenant = place.split("/")[2]
            try:
                found = self._catalog.read(place)
            except (DamagedRemoteError, UnfitStoreError, OvertakenError):
                result.num_damaged += 1
                unknown.add(tenant)
                continue
            if found is None:
                continue
            age_s = now_s - found.version.stored_unix_s
            if found.manifest.dropped:
                if age_s >= GRACE_S:
                    self._catalog.forget(found)
                    result.num_forgotten += 1
                continue
            if has_expired(found.manifest, age_s):
                try:
                    self._catalog.drop(found)
                    result.num_expired += 1
                    continue
                except (OvertakenError, DamagedRemoteError):  # it was pushed meanwhile
                    unknown.add(tenant)
            result.num_sessions += 1
            named.update(f"{tenant}/{chunk.name}" for chunk in objects_of(found.manifest))
        return named, unknown

    def _sweep_chunks(
        self, now_s: float, named: set[str], unknown: set[str], result: SweepResult
    ) -> None:
        """Remove chunks that were condemned long enough ago, and condemn those without a name."""
        sizes: dict[str, Blob] = {}
        for blob in list_blobs(self._store, all_chunks()):
            if (name := _of_tenant(blob)).split("/")[0] not in unknown:
                sizes[name] = blob
        condemned: set[str] = set()
        for blob in list_blobs(self._store, all_condemned()):
            tenant = place_of(blob.name).rpartition("/")[2]
            names = {f"{tenant}/{name}" for name in self._names_in(blob)}
            condemned |= names
            if tenant in unknown or now_s < blob.stored_unix_s + GRACE_S:
                continue
            if now_s >= blob.stored_unix_s + 2 * GRACE_S:
                self._store.delete([blob.name])
                continue
            self._remove((sizes[name] for name in names - named if name in sizes), result)
        by_tenant: defaultdict[str, list[str]] = defaultdict(list)
        for name, blob in sizes.items():
            is_old = now_s >= blob.stored_unix_s + GRACE_S  # a later push may reuse recent ones
            if is_old and name not in named and name not in condemned:
                tenant, _, chunk = name.partition("/")
                by_tenant[tenant].append(chunk)
        for tenant, chunks in by_tenant.items():
            path = f"{all_condemned()}/{tenant}/{secrets.token_hex(8)}"
            self._store.put(path, condemned_list(chunks))
            result.num_condemned += len(chunks)

    def _sweep_deleted(self, now_s: float, result: SweepResult) -> None:
        """Remove tombstones of the services that are so old that each service has seen them."""
        for blob in chain(
            *(list_blobs(self._store, kind) for kind in (TRANSCRIPTS, CONVERSATIONS))
        ):
            is_mark = is_version(blob.name) and blob.num_bytes == DELETED_BYTES
            if not is_mark or now_s < blob.stored_unix_s + KNOWN_S:
                continue
            register = Register(self._store, place_of(blob.name))
            seen = register.look()
            if blob.name == register.name_of(seen.number):  # else a session of this id began again
                register.remove(seen)
                result.num_forgotten += 1

    def _sweep_answers(self, now_s: float, result: SweepResult) -> None:
        """Remove old histories and responses, and the unnamed transcripts they lead to, if old too.

        Each turn of an unnamed session leaves a history or response: a session in use has new ones.
        """
        old_s = now_s - self._unnamed_s
        answers = [*list_blobs(self._store, HISTORIES), *list_blobs(self._store, RESPONSES)]
        old = [blob.name for blob in answers if blob.stored_unix_s <= old_s]
        for place in {place for place in map(self._unnamed_at, old) if place}:
            versions = [blob for blob in list_blobs(self._store, place) if is_version(blob.name)]
            newest = max(versions, key=number_of, default=None)
            if newest is None or newest.stored_unix_s > old_s:
                continue
            if newest.num_bytes != DELETED_BYTES:  # a tombstone stays until every service saw it
                seen = Seen(number_of(newest), frozenset(blob.name for blob in versions))
                Register(self._store, place).remove(seen)
                result.num_unnamed += 1
        self._store.delete(old)

    def _unnamed_at(self, name: str) -> str:
        """Return the place of the unnamed transcript that an answer leads to; "": none."""
        try:
            data = self._store.get(name)
        except BlobMissingError:
            return ""
        if name.startswith(f"{HISTORIES}/"):
            entry = decode_entry(data)
            return entry.transcript if entry else ""
        response = decode_response(data)
        return response.transcript if response and not response.named else ""

    def _names_in(self, blob: Blob) -> list[str]:
        try:
            return condemned_names(self._store.get(blob.name))
        except BlobMissingError:
            return []

    def _remove(self, blobs: Iterable[Blob], result: SweepResult) -> None:
        found = list(blobs)
        self._store.delete([blob.name for blob in found])
        result.num_removed += len(found)
        result.removed_bytes += sum(blob.num_bytes for blob in found)


def _of_tenant(blob: Blob) -> str:
    """Return a chunk's name as TENANT/CHUNK."""
    return blob.name.removeprefix(f"{all_chunks()}/")
