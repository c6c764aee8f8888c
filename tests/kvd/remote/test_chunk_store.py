"""Chunks are named by the digest of their bytes; reading returns these bytes or fails."""

import hashlib
from random import Random

import pytest
from blake3 import blake3

from kvd.remote.chunk_store import ChunkStore
from kvd.remote.errors import DamagedRemoteError
from kvd.remote.names import chunks_place
from shared.pb.kvd.v1 import kvd_pb2 as pb
from tests.faulty_store import FaultyStore, View

DATA = b"frames of a session"
OF_VERSION_1 = pb.RemoteChunk(
    name=hashlib.sha256(DATA).hexdigest(),
    sha256=hashlib.sha256(DATA).digest(),
    num_bytes=len(DATA),
)


def _store() -> View:
    return View(FaultyStore(Random(5)), is_calm=True)  # noqa: S311


def test_a_stored_chunk_is_not_sent_again() -> None:
    """Its name identifies it."""
    store = _store()
    chunks = ChunkStore(store, "acme")
    chunk, sent = chunks.put(bytearray(DATA), 16, {})
    assert (chunk.name, chunk.blake3, sent) == (
        blake3(DATA).hexdigest(),
        blake3(DATA).digest(),
        len(DATA),
    )
    assert ChunkStore(store, "acme").put(DATA, 16, {}) == (chunk, 0)
    assert ChunkStore(store, "acme").view(chunk) == DATA
    with pytest.raises(DamagedRemoteError, match="is not there"):
        ChunkStore(store, "other").view(chunk)


@pytest.mark.parametrize("changed", [b"", DATA[:-1], DATA[:-1] + b"N", DATA + b"n"])
@pytest.mark.parametrize("is_old", [False, True])
def test_changed_bytes_are_detected(changed: bytes, is_old: bool) -> None:
    """In chunks that an older release has named, too, which can still be read."""
    store = _store()
    chunks = ChunkStore(store, "acme")
    chunk = OF_VERSION_1 if is_old else chunks.put(DATA, 16, {})[0]
    name = f"{chunks_place('acme')}/{chunk.name}"
    store.put(name, DATA)
    assert chunks.view(chunk) == DATA
    store.put(name, changed)
    with pytest.raises(DamagedRemoteError, match="is damaged"):
        chunks.view(chunk)
