"""Imports: a session is imported completely or not at all, under the given name."""

from dataclasses import replace

import pytest

from kvd.core.records.entries import Pin
from kvd.errors import InUseError, SessionExistsError, UnknownLayoutError
from kvd.session_files.exporter import Exporter
from kvd.session_files.file_format import SessionFileError
from kvd.session_files.slot_runs import SlotRuns
from kvd.session_files.target import Target
from kvd.session_files.transfers import read_file
from shared.access.identity import TenantDeniedError
from tests.kvd.caches.cache_bench import LAYOUT, caches_in, store
from tests.synthetic_engine import encode, key_of, small_layout

AS_IT_IS = Target("", "", replaces=False, may_add_layout=False)


async def export_bytes(caches, key):
    """Return the bytes of a session's file."""
    pieces = Exporter(caches, key).pieces(prefix=False)
    return b"".join([bytes(piece.data) async for piece in pieces])


async def in_pieces(file, num_bytes=100):
    for start in range(0, len(file), num_bytes):
        yield file[start : start + num_bytes]


def rows_of(cache, key):
    """Return the rows of a session's only block, without the slot's gaps between layers."""
    (block,) = cache.act(lambda core: core.inspection.describe(key)).blocks
    slot_id = cache.act(lambda core: core._state.blocks[block.key].slot_id)
    return b"".join(
        map(bytes, SlotRuns.of_tokens(LAYOUT).read(cache.arena.slots.slot(slot_id), 0, 16))
    )


def keys_of(cache):
    return set(cache.act(lambda core: core.inspection.keys()))


async def file_of_one(directory):
    """Make a file with one session; its rows are not all zero."""
    async with caches_in(directory) as caches:
        cache, arena = await caches.open(LAYOUT)
        key, tokens = key_of("a"), range(16)
        answer = cache.act(
            lambda core: core.stores.prepare(
                key, b"".join(token.to_bytes(4, "little") for token in tokens), 0, 1
            )
        )
        (block,) = answer.blocks
        slot = arena.slots.slot(block.slot_id)
        slot[:] = bytes(number % 251 for number in range(len(slot)))
        cache.act(lambda core: core.stores.complete(answer.lease_id, 1, success=True))
        return await export_bytes(caches, key), rows_of(cache, key)


async def test_a_session_is_imported_with_every_row(tmp_path):
    """Whatever the pieces of its file."""
    file, rows = await file_of_one(tmp_path)
    for number, num_bytes in enumerate((1000, 7, len(file))):
        async with caches_in(tmp_path / str(number)) as caches:
            cache, _ = await caches.open(LAYOUT)
            key, num_tokens = await read_file(caches, AS_IT_IS, in_pieces(file, num_bytes))
            assert (key, num_tokens) == (key_of("a"), 16)
            assert rows_of(cache, key) == rows
            assert keys_of(cache) == {key}, "nothing under another name is left"


async def test_a_session_may_get_another_name_and_tenant(tmp_path):
    """Its blocks then belong to the other tenant, which shares none."""
    file, rows = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        target = Target("acme", "b", replaces=False, may_add_layout=False)
        key, _ = await read_file(caches, target, in_pieces(file))
        assert key == key_of("b", "acme")
        assert rows_of(cache, key) == rows


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
async def test_a_file_that_ends_early_leaves_nothing(tmp_path, share):
    """A session that it was to replace stays as it is."""
    file, _ = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        there = store(cache, "a", first_token=100)
        before = rows_of(cache, there)
        target = Target("", "", replaces=True, may_add_layout=False)
        with pytest.raises(SessionFileError):
            await read_file(caches, target, in_pieces(file[: int(len(file) * share)]))
        assert keys_of(cache) == {there}
        assert rows_of(cache, there) == before
        assert not cache.act(lambda core: core.inspection.leases())


async def test_a_flipped_bit_is_detected(tmp_path):
    """Wherever it is: no wrong byte is ever served."""
    file, _ = await file_of_one(tmp_path)
    for position in range(0, len(file), len(file) // 12):
        damaged = bytearray(file)
        damaged[position] ^= 1
        async with caches_in(tmp_path / str(position)) as caches:
            cache, _ = await caches.open(LAYOUT)
            with pytest.raises(SessionFileError):
                await read_file(caches, AS_IT_IS, in_pieces(bytes(damaged)))
            assert not keys_of(cache)


async def test_an_existing_session_is_replaced_only_on_request(tmp_path):
    """Both changes take effect at once."""
    file, rows = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        there = store(cache, "a", first_token=100)
        with pytest.raises(SessionExistsError):
            await read_file(caches, AS_IT_IS, in_pieces(file))
        target = Target("", "", replaces=True, may_add_layout=False)
        await read_file(caches, target, in_pieces(file))
        assert keys_of(cache) == {there}
        assert rows_of(cache, there) == rows


def store_part(cache, first_token=0):
    """Store half of a session's only block; return its key."""
    key, tokens = key_of("a"), encode(range(first_token, first_token + 8))
    answer = cache.act(lambda core: core.stores.prepare(key, tokens, 0, 1))
    cache.act(lambda core: core.stores.complete(answer.lease_id, 1, success=True))
    return key


UP_TO_8 = replace(AS_IT_IS, replaces_up_to=8)


@pytest.mark.parametrize("first_token", [0, 100])
async def test_a_shorter_part_becomes_the_session(tmp_path, first_token):
    """If it has the same tokens; its settings stay, and it is never missing."""
    file, rows = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        there = store_part(cache, first_token)
        cache.act(lambda core: core.sessions.pin(there, Pin.SOFT))
        cache.act(lambda core: core.sessions.set_ttl(there, 10**15))
        assert await read_file(caches, UP_TO_8, in_pieces(file)) == (there, 16)
        assert keys_of(cache) == {there}
        assert rows_of(cache, there) == rows
        info = cache.act(lambda core: core.inspection.info(there))
        assert (info.pin, info.ttl_ns, info.lost) == (Pin.SOFT, 10**15, "")
        assert not cache.stats().counters["sessions_dropped"]
        cache.act(lambda core: core.check())


async def test_a_part_that_has_grown_stays(tmp_path):
    """Beyond the announced length, or to the file's; so does one in use."""
    file, _ = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        there = store_part(cache, first_token=100)
        with pytest.raises(SessionExistsError):
            await read_file(caches, replace(AS_IT_IS, replaces_up_to=7), in_pieces(file))
        load = cache.act(lambda core: core.loads.prepare(there, encode(range(100, 108)), 0, 1))
        with pytest.raises(InUseError):
            await read_file(caches, UP_TO_8, in_pieces(file))
        cache.act(lambda core: core.loads.complete(load.lease_id, 1))
        assert cache.act(lambda core: core.inspection.info(there)).num_tokens == 8
        before = rows_of(cache, store(cache, "a", first_token=100))
        with pytest.raises(SessionExistsError):
            await read_file(caches, replace(AS_IT_IS, replaces_up_to=16), in_pieces(file))
        assert keys_of(cache) == {there}
        assert rows_of(cache, there) == before
        assert not cache.act(lambda core: core.inspection.leases())


async def test_an_unknown_layout_is_added_only_on_request(tmp_path):
    """And by callers of all tenants only: it takes memory from all."""
    file, rows = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        await caches.open(small_layout(num_layers=3))
        with pytest.raises(UnknownLayoutError):
            await read_file(caches, AS_IT_IS, in_pieces(file))
        of_one = Target("", "", replaces=False, may_add_layout=True, allowed=frozenset({"default"}))
        with pytest.raises(TenantDeniedError):
            await read_file(caches, of_one, in_pieces(file))
        anybody = Target("", "", replaces=False, may_add_layout=True)
        key, _ = await read_file(caches, anybody, in_pieces(file))
        (cache,) = [cache for cache in caches if cache.layout == LAYOUT]
        assert rows_of(cache, key) == rows


async def test_an_import_into_another_tenant_is_refused(tmp_path):
    """The file's tenant counts where none is named."""
    file, _ = await file_of_one(tmp_path)
    async with caches_in(tmp_path / "other") as caches:
        cache, _ = await caches.open(LAYOUT)
        theirs = Target("", "", replaces=False, may_add_layout=False, allowed=frozenset({"acme"}))
        with pytest.raises(TenantDeniedError):
            await read_file(caches, theirs, in_pieces(file))
        assert not keys_of(cache)
