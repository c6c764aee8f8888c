"""The chunks of one tenant in a remote store: objects named by the digest of their bytes.

A chunk is stored once, however many manifests name it. A sweep removes chunks that no manifest
names, and must not remove one that a push has just found and is about to name. Therefore it
condemns chunks first: it puts their names into a list. GRACE_S later it removes those that still no
manifest names. A push reads these lists at its start. It does not reuse a condemned chunk, but
stores it again under a name with a suffix. A push has to end within PUSH_S, so that no list made
after its start can take effect before its end.
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
from shared.blobs.blob_store import Blob, BlobDamagedError, BlobMissingError, BlobStore, Data
from shared.pb.kvd.v1 import kvd_pb2 as pb

GRACE_S = 24 * 3600.0  # between the condemnation of a chunk and its removal
PUSH_S = GRACE_S / 2  # the longest time that a push may take


class ChunkStore:
    """Puts and gets the chunks of one tenant. Any thread may call it.

    Args:
        store: the store that holds the chunks.
        tenant: the tenant's name.
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
        """Make sure that a chunk is in the store.

        Args:
            data: its bytes.
            end_token: the session's token behind the last one in the chunk.
            known: chunks, by digest, that a valid manifest names. They are in the store, unless it
                is one that may lose objects.
            before_sending: called with the number of bytes to send, if any.
            looks: look for the chunk in the store though it is not known; costs a request.

        Returns:
            The chunk as a manifest names it, and the number of bytes that were sent.
        """
        digest = blake3(data).digest()
        chunk = pb.RemoteChunk(
            name=digest.hex(),
            blake3=digest,
            num_bytes=len(data),
            end_token=end_token,
        )
        existing = known.get(chunk.blake3)
        if existing is not None and existing.name not in self._condemned:
            chunk.name = existing.name
            if self._store.keeps:
                return chunk, 0
        elif chunk.name in self._condemned:
            chunk.name += f"-{secrets.token_hex(4)}"
        if (looks or existing is not None) and _is_there(
            self._store, self._path(chunk), chunk.num_bytes
        ):
            return chunk, 0
        before_sending(len(data))
        self._store.put(self._path(chunk), data)
        return chunk, len(data)

    def view(self, chunk: pb.RemoteChunk) -> memoryview:
        """Return the bytes of a chunk without a copy, verified.

        Raises:
            DamagedRemoteError: the chunk is missing, or its bytes are not those that were put.
        """
        try:
            data = self._store.view(self._path(chunk))
        except BlobMissingError as error:
            raise _lost_error(chunk, "is not there") from error
        except BlobDamagedError as error:
            raise _lost_error(chunk, "is damaged") from error
        if not _is_sound(data, chunk):
            raise _lost_error(chunk, "is damaged")
        return data

    def check_time(self) -> None:
        """Check that no sweep can have removed the chunks that this object has found or put.

        Call it before a manifest names them.

        Raises:
            SlowPushError: more than PUSH_S have passed, so a sweep may have removed some.
        """
        if self._clock() > self._until_s:
            raise SlowPushError(
                f"the push took more than {PUSH_S / 3600:g} h",
                "push it again: what was sent stays in the object store",
            )

    def _path(self, chunk: pb.RemoteChunk) -> str:
        return f"{self._place}/{chunk.name}"


def has_lost(store: BlobStore, tenant: str, chunks: Iterable[pb.RemoteChunk]) -> bool:
    """Return whether some of a tenant's chunks are missing; never in a store that keeps objects."""
    if store.keeps:
        return False
    place = chunks_place(tenant)
    return not all(_is_there(store, f"{place}/{chunk.name}", chunk.num_bytes) for chunk in chunks)


def _is_sound(data: memoryview, chunk: pb.RemoteChunk) -> bool:
    """Return whether these are the bytes of a chunk; early manifests have SHA-256 digests."""
    if len(data) != chunk.num_bytes:
        return False
    if chunk.blake3:
        return blake3(data).digest() == chunk.blake3
    return hashlib.sha256(data).digest() == chunk.sha256


def _is_there(store: BlobStore, name: str, num_bytes: int) -> bool:
    found = store.find(name)
    return found is not None and found.num_bytes == num_bytes


def list_blobs(store: BlobStore, place: str) -> list[Blob]:
    """Return all objects under a place."""
    return [blob for page in store.list(f"{place}/") for blob in page]


def read_condemned(store: BlobStore, lists: Iterable[Blob]) -> frozenset[str]:
    """Return the names of chunks in lists of condemned chunks."""
    names: set[str] = set()
    for blob in lists:
        with suppress(BlobMissingError):  # a sweep has removed this list meanwhile, long after it
            names.update(condemned_names(store.get(blob.name)))
    return frozenset(names)


def condemned_names(data: bytes) -> list[str]:
    """Decode a list of condemned chunks.

    Raises:
        DamagedRemoteError: these bytes are no such list.
    """
    try:
        names = json.loads(data)["chunks"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedRemoteError(
            "a list of condemned chunks in the object store is damaged",
            "remove it: it is under v1/condemned",
        ) from error
    return [str(name) for name in names]


def condemned_list(names: Iterable[str]) -> bytes:
    """Encode a list of condemned chunks."""
    return json.dumps({"chunks": sorted(names)}).encode()


def _lost_error(chunk: pb.RemoteChunk, what: str) -> DamagedRemoteError:
    return DamagedRemoteError(
        f"chunk {chunk.name[:12]} {what}",
        "push the session again with --resend --take, from a server that has it",
    )
