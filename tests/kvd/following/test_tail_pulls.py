"""Pulls of a real kvd that has the first part of a session: only the missing part is fetched."""

import asyncio

import pytest

from kvd.core.operations.growing import NOT_FETCHED
from kvd.remote.catalog import Catalog
from kvd.remote.names import session_place
from shared.encryption.key_file import new_key, write_key
from shared.types.block_key import TOKEN_BYTES
from tests.faulty_store import View
from tests.moved_session import (
    CHUNK_TOKENS,
    KEY,
    NUM_CHUNKS,
    TOKENS,
    Place,
    moved_session,
    refusal,
)


@pytest.fixture(autouse=True)
def grows_at_once(monkeypatch):
    """Let sessions grow with each chunk, however small."""
    monkeypatch.setattr("kvd.remote.pulling.GROW_BYTES", 1)


async def pull_session(place: Place) -> tuple[list[int], int]:
    """Pull the session; return which of its chunks were fetched, and how many bytes in all."""
    place.store.fetched.clear()
    found = await place.pull()
    assert found is not None
    names = place.store.fetched
    chunks = [number for number, name in enumerate(place.store.chunks) if name in names]
    return chunks, found[1].num_bytes


@pytest.mark.parametrize(
    ("num_here", "first"),
    [
        (0, 0),
        (CHUNK_TOKENS - 1, 0),
        (CHUNK_TOKENS, 1),
        (5 * CHUNK_TOKENS + 7, 5),  # all but a part of the last one
        (len(TOKENS) - 1, NUM_CHUNKS - 1),
    ],
)
async def test_only_missing_chunks_are_fetched(tmp_path, num_here, first):
    """From the end of a chunk on; the session then equals the pushed one, byte for byte."""
    async with moved_session(tmp_path) as place:
        await place.pull()
        whole = await place.exported()
        await place.flush()
        if num_here:
            await place.engine.store(KEY, TOKENS[:num_here])
            place.own_elsewhere()
        chunks, num_bytes = await pull_session(place)
        assert chunks == [*range(first, NUM_CHUNKS)]
        wanted = sum(chunk.num_bytes for chunk in place.manifest.chunks[first:])
        assert num_bytes == wanted + (len(TOKENS) * TOKEN_BYTES if first else 0)
        assert await place.here() == (len(TOKENS), "")
        assert await place.exported() == whole
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)


async def test_after_a_restart_of_kvd_its_blocks_on_ssd_count(tmp_path):
    """The tokens of a block are not in memory: its key identifies it."""
    async with moved_session(tmp_path, keep="none") as place:
        await place.engine.store(KEY, TOKENS[: 3 * CHUNK_TOKENS])
        place.own_elsewhere()
        await place.restart()
        chunks, _ = await pull_session(place)
        assert chunks == [3, 4, 5]
        assert await place.here() == (len(TOKENS), "")


async def test_a_session_with_other_tokens_is_fetched_completely(tmp_path):
    """The local one diverged; the pulled one replaces it, as before."""
    async with moved_session(tmp_path) as place:
        await place.engine.store(KEY, [*TOKENS[:CHUNK_TOKENS], *range(CHUNK_TOKENS)])
        place.own_elsewhere()
        chunks, num_bytes = await pull_session(place)
        assert chunks == [*range(NUM_CHUNKS)]
        assert num_bytes >= sum(chunk.num_bytes for chunk in place.manifest.chunks)
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)


@pytest.mark.parametrize("lacks", ["the name", "the object", "its bytes"])
async def test_without_known_tokens_everything_is_fetched(tmp_path, lacks):
    """A manifest of an older release, an object that an older sweep has removed, or damage."""
    async with moved_session(tmp_path) as place:
        await place.engine.store(KEY, TOKENS[: 3 * CHUNK_TOKENS])
        [name] = [n for n in place.blobs.blobs if n.endswith(place.manifest.token_ids.name)]
        if lacks == "the object":
            del place.blobs.blobs[name]
        elif lacks == "its bytes":
            data, stored_s = place.blobs.blobs[name]
            place.blobs.blobs[name] = (data[:-1] + b"\7", stored_s)
        place.own_elsewhere(names_tokens=lacks != "the name")
        chunks, _ = await pull_session(place)
        assert chunks == [*range(NUM_CHUNKS)]
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)


async def test_a_sealed_session_is_fetched_completely(tmp_path):
    """Its tokens are hidden, and only its end proves that every chunk was there."""
    write_key(tmp_path / "key", new_key())
    async with moved_session(tmp_path, KVD_ENCRYPTION__KEY_FILE=str(tmp_path / "key")) as place:
        assert not place.manifest.HasField("token_ids")
        await place.engine.store(KEY, TOKENS[: 3 * CHUNK_TOKENS])
        place.own_elsewhere()
        chunks, _ = await pull_session(place)
        assert chunks == [*range(NUM_CHUNKS)]
        assert await place.here() == (len(TOKENS), "")


async def test_a_pull_continues_where_the_last_one_was_interrupted(tmp_path):
    """Chunks that arrived are not fetched again."""
    async with moved_session(tmp_path) as place:
        place.damage(3)
        assert await refusal(asyncio.create_task(place.pull())) == "damaged_remote"
        assert await place.here() == (3 * CHUNK_TOKENS, NOT_FETCHED)
        place.damage(3)
        chunks, _ = await pull_session(place)
        assert chunks == [3, 4, 5]
        assert await place.here() == (len(TOKENS), "")
        assert (await place.engine.load(KEY, TOKENS)).num_tokens == len(TOKENS)


async def test_the_pulling_server_becomes_the_owner(tmp_path):
    """Of a tail as of a whole session; its next push names all chunks again."""
    async with moved_session(tmp_path) as place:
        await place.engine.store(KEY, TOKENS[:CHUNK_TOKENS])
        place.own_elsewhere()
        before = place.manifest
        await place.pull()
        found = Catalog(View(place.blobs, is_calm=True)).read(session_place(KEY))
        assert (found.manifest.owner, found.manifest.epoch) == ("here", before.epoch + 1)
        assert (found.manifest.chunks, found.manifest.token_ids) == (
            before.chunks,
            before.token_ids,
        )
