"""Layouts that take and release their part of DRAM, inside one process."""

import asyncio
import sqlite3
from contextlib import closing
from functools import partial

import pytest

from kvd.caches.layout_opening import VOLUMES
from kvd.errors import LimitReachedError
from kvd.tiers.arena import ArenaTooSmallError
from tests.kvd.caches.cache_bench import LAYOUT, caches_in, store
from tests.kvd_polling import eventually
from tests.synthetic_engine import encode, small_layout

LONG_NS = 4_000_000_000_000


async def test_an_arena_is_released_completely_or_not_at_all(tmp_path):
    """The caller may be cancelled while the pages are still being allocated."""
    async with caches_in(tmp_path) as caches:
        cache, arena = await caches.open(LAYOUT)
        cache._prefault = asyncio.get_running_loop().create_future()  # one that takes long
        giving_up = asyncio.create_task(cache.unmount(30))
        while not arena.closing.is_set():  # noqa: ASYNC110  # it has no event
            await asyncio.sleep(0)
        giving_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await giving_up
        assert cache.arena is arena
        assert cache.stats().tiers[0].capacity_bytes == arena.num_bytes
        cache._prefault.set_result(0)
        assert await cache.unmount(30)
        assert cache.arena is None
        assert cache.stats().tiers[0].capacity_bytes == 0


async def test_a_layout_without_an_arena_is_not_kept(tmp_path):
    """It would count towards limits.max_layouts for ever."""
    async with caches_in(tmp_path) as caches:
        await caches.open(LAYOUT)
        with pytest.raises(ArenaTooSmallError):
            await caches.open(small_layout(num_layers=64))
        assert [cache.layout for cache in caches] == [LAYOUT]


async def test_an_action_that_cannot_begin_ends_the_daemon(tmp_path):
    """Its operation would never be answered, and would hold a slot for ever."""
    reported = []
    async with caches_in(tmp_path) as caches:
        cache, _ = await caches.open(LAYOUT)
        cache._on_broken = reported.append
        before, cache._on_event = cache._on_event, _fail
        with pytest.raises(ZeroDivisionError):
            cache.act(lambda core: core.engines.remove(1))
        cache._on_event = before
    assert [type(error) for error in reported] == [ZeroDivisionError]


def _fail(_event):
    raise ZeroDivisionError


async def test_an_empty_layout_makes_room_for_a_new_one(tmp_path):
    """The one opened longest ago is removed with its arena, volume and row.

    Others have sessions.
    """
    first, second, third = (small_layout(num_layers) for num_layers in (1, 2, 3))
    async with caches_in(tmp_path, max_layouts=2) as caches:
        for layout in (first, second):
            await caches.open(layout)
        await caches.open(first)
        await caches.open(third)
        await caches.wait_until_committed()
        assert [cache.layout for cache in caches] == [first, third]
        volumes = {path.name for path in (tmp_path / VOLUMES).iterdir()}
        assert volumes == {first.fingerprint, third.fingerprint}
    async with caches_in(tmp_path, max_layouts=2) as caches:
        caches.restore()
        assert {cache.layout for cache in caches} == {first, third}
        for layout in (first, third):
            store((await caches.open(layout))[0])
        with pytest.raises(LimitReachedError, match="flush"):
            await caches.open(second)


async def test_an_index_that_falls_behind_gets_few_rows_and_later_all(tmp_path, monkeypatch):
    """Uncommitted rows stay within their bound; once it commits again, it gets the latest."""
    bound = 4096
    monkeypatch.setattr("kvd.tiers.manifest.MAX_QUEUED_BYTES", bound)
    async with caches_in(tmp_path) as caches:
        cache, _ = await caches.open(LAYOUT)
        keys = [store(cache, f"s{number}", 100 * number) for number in range(4)]
        await caches.wait_until_committed()
        with closing(sqlite3.connect(tmp_path / "manifest.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for ttl_ns in range(LONG_NS, LONG_NS + 400):
                key = keys[ttl_ns % 4]
                cache.act(partial(_set_ttl, key, ttl_ns))
                assert caches.index_queued_bytes <= bound + 1024
            assert cache.has_entries_waiting
            num_rows, _ = cache.act(lambda core: (len(core.index_line), core.index_line.num_uses))
            assert num_rows <= len(keys) + 4, "those of sessions, and of their blocks"
            other.execute("ROLLBACK")
        await caches.wait_until_committed()
        assert not cache.has_entries_waiting
    async with caches_in(tmp_path) as caches:
        caches.restore()
        (cache,) = caches
        infos = [cache.act(partial(_info, key)) for key in keys]
        assert [info.ttl_ns for info in infos] == [LONG_NS + 396 + number for number in range(4)]


async def test_the_last_use_of_a_session_is_written_without_another_call(tmp_path):
    """A load changes nothing else in the index."""
    async with caches_in(tmp_path) as caches:
        cache, _ = await caches.open(LAYOUT)
        key = store(cache)
        await caches.wait_until_committed()
        stored = cache.act(partial(_info, key))
        tokens = encode(range(16))
        answer = cache.act(lambda core: core.loads.prepare(key, tokens, 0, 1))
        cache.act(lambda core: core.loads.complete(answer.lease_id, 1))

        async def num_uses():
            return cache._engine.index_line.num_uses

        assert await num_uses() == 1
        await eventually(num_uses, 0)
        await caches.wait_until_committed()
    async with caches_in(tmp_path) as caches:
        caches.restore()
        (cache,) = caches
        assert cache.act(partial(_info, key)).last_access_ns > stored.last_access_ns


def _set_ttl(key, ttl_ns, core):
    core.sessions.set_ttl(key, ttl_ns)


def _info(key, core):
    return core.inspection.info(key)
