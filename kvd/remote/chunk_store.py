"""A tenant's chunks in a store: objects named by the digest of their bytes, each there once.

A sweep removes chunks that no manifest names, and must not remove one that a push has just found
and is about to name. So it condemns them first: their names lie in a list for GRACE_S, and only
then are those removed that still no manifest names. A push reads the lists first, passes over what
is condemned, under a name with a suffix, and has to be done within PUSH_S.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from blake3 import blake3

from kvd.remote.errors import DamagedRemoteError, SlowPushError
from kvd.remote.names import chunks_place, condemned_place
from shared.blobs.blob_store import Blob, BlobStore, Data
from shared.blobs.errors import BlobDamagedError, BlobMissingError
from shared.pb.kvd.v1 import kvd_pb2 as pb

GRACE_S = 24 * 3600.0
PUSH_S = GRACE_S / 2


class ChunkStore:
    """Puts and gets the chunks of one tenant. Any thread.

    Args:
        store: where they are.
        tenant: whose.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: BlobStore, tenant: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._place = chunks_place(tenant)
        self._clock = clock
        self._until_s = clock() + PUSH_S
        self._condemned = read_condemned(store, list_blobs(store, condemned_place(tenant)))

    def put(
        self,
        data: Data,
        end_token: int,
        known: Mapping[bytes, pb.RemoteChunk],
        before_sending: Callable[[int], None] = lambda _: None,
        *,
        looks: bool = True,
    ) -> tuple[pb.RemoteChunk, int]:
        """Have a chunk in the store; returns how a manifest names it, and the bytes that were sent.

        Args:
            data: its bytes.
            end_token: of the session, where it ends.
            known: chunks that are there, by a manifest that counts, unless the store loses some; by
                their digests.
            before_sending: called with how many bytes will be sent, if any are.
            looks: whether it may be there though it is not known; that costs a request.
        """
        digest = blake3(data).digest()
        chunk = pb.RemoteChunk(
            name=digest.hex(),
            blake3=digest,
            num_bytes=len(data),
            end_token=end_token,
        )
        there = known.get(chunk.blake3)
        if there is not None and there.name not in self._condemned:
            chunk.name = there.name
            if self._store.keeps:
                return chunk, 0
        elif chunk.name in self._condemned:
            chunk.name += f"-{secrets.token_hex(4)}"
        if (looks or there is not None) and _is_there(
            self._store, self._path(chunk), chunk.num_bytes
        ):
            return chunk, 0
        before_sending(len(data))
        self._store.put(self._path(chunk), data)
        return chunk, len(data)

    def view(self, chunk: pb.RemoteChunk) -> memoryview:
        """Return the bytes of a chunk, where they lie.

        Raises:
            DamagedRemoteError: they are not there, or not what was put there.
        """
        try:
            data = self._store.view(self._path(chunk))
        except BlobMissingError as error:
            raise _lost(chunk, "is not there") from error
        except BlobDamagedError as error:
            raise _lost(chunk, "is damaged") from error
        if not _is_sound(data, chunk):
            raise _lost(chunk, "is damaged")
        return data

    def check_time(self) -> None:
        """Make sure that what was found in the store is still there, before it is named.

        Raises:
            SlowPushError: nobody knows.
        """
        if self._clock() > self._until_s:
            raise SlowPushError(
                f"the push took more than {PUSH_S / 3600:g} h", "push it again: what is there stays"
            )

    def _path(self, chunk: pb.RemoteChunk) -> str:
        return f"{self._place}/{chunk.name}"


def has_lost(store: BlobStore, tenant: str, chunks: Iterable[pb.RemoteChunk]) -> bool:
    """Whether some of a tenant's chunks are gone; of a store that keeps what it has, none is."""
    if store.keeps:
        return False
    place = chunks_place(tenant)
    return not all(_is_there(store, f"{place}/{one.name}", one.num_bytes) for one in chunks)


def _is_sound(data: memoryview, chunk: pb.RemoteChunk) -> bool:
    """Whether these are the bytes of a chunk."""
    if len(data) != chunk.num_bytes:
        return False
    if chunk.blake3:
        return blake3(data).digest() == chunk.blake3
    return hashlib.sha256(data).digest() == chunk.sha256


def _is_there(store: BlobStore, name: str, num_bytes: int) -> bool:
    found = store.find(name)
    return found is not None and found.num_bytes == num_bytes


def list_blobs(store: BlobStore, place: str) -> list[Blob]:
    """Return all objects of a place."""
    return [blob for page in store.list(f"{place}/") for blob in page]


def read_condemned(store: BlobStore, lists: Iterable[Blob]) -> frozenset[str]:
    """Return the names of chunks in lists of condemned ones."""
    names: set[str] = set()
    for blob in lists:
        with suppress(BlobMissingError):  # done with meanwhile, long after it was made
            names.update(condemned_names(store.get(blob.name)))
    return frozenset(names)


def condemned_names(data: bytes) -> list[str]:
    """Decode a list of condemned chunks.

    Raises:
        DamagedRemoteError: it is none.
    """
    try:
        names = json.loads(data)["chunks"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRemoteError(
            "a list of condemned chunks is damaged", "remove it: see v1/condemned in the store"
        ) from error
    return [str(name) for name in names]


def condemned_list(names: Iterable[str]) -> bytes:
    """Encode a list of condemned chunks."""
    return json.dumps({"chunks": sorted(names)}).encode()


def _lost(chunk: pb.RemoteChunk, what: str) -> DamagedRemoteError:
    return DamagedRemoteError(
        f"chunk {chunk.name[:12]} {what}", "push the session again from a server that has it"
    )
