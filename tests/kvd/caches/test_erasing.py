"""Erasing a tenant removes its sessions and its key from every tier; others lose nothing."""

import asyncio

import pytest

from kvd.caches.erasing import NotErasableError, TenantEraser
from kvd.caches.layout_opening import VOLUMES
from kvd.caches.tenant_secrets import has_segments
from kvd.core.records.actions import Emit
from kvd.wire.events import EventFilter, EventHub
from shared.encryption.key_file import new_key, write_key
from tests.kvd.caches.cache_bench import LAYOUT, caches_in, store
from tests.synthetic_engine import key_of


@pytest.fixture
def key_file(tmp_path):
    write_key(tmp_path / "key", new_key())
    return str(tmp_path / "key")


def sessions_of(cache):
    return set(cache.act(lambda core: core.inspection.keys()))


async def test_one_tenant_is_erased_and_another_stays(tmp_path, key_file):
    """The erased one may return at once, with other keys."""
    async with caches_in(tmp_path, key_file=key_file) as caches:
        caches.restore()
        cache, _ = await caches.open(LAYOUT)
        gone = [store(cache, name, number, tenant="a") for number, name in enumerate(("x", "y"))]
        kept = store(cache, "x", tenant="b")
        secrets = caches.secrets.keys
        before = secrets.key_of("a"), secrets.key_of("b")
        erased = await TenantEraser(caches, EventHub(1)).erase("a")
        assert (erased.tenants, erased.num_sessions) == (("a",), len(gone))
        assert erased.freed_bytes >= 2 * LAYOUT.block_bytes
        assert sessions_of(cache) == {kept}
        assert secrets.tenants == ("b",)
        again = store(cache, "x", tenant="a")
        assert sessions_of(cache) == {kept, again}
        assert secrets.key_of("a") != before[0]
        assert secrets.key_of("b") == before[1]


async def test_all_tenants_are_erased(tmp_path, key_file):
    """None is left, not even in the index."""
    async with caches_in(tmp_path, key_file=key_file) as caches:
        caches.restore()
        cache, _ = await caches.open(LAYOUT)
        for tenant in ("a", "b"):
            store(cache, tenant=tenant)
        erased = await TenantEraser(caches, EventHub(1)).erase(None)
        assert (sorted(erased.tenants), erased.num_sessions) == (["a", "b"], 2)
        assert not sessions_of(cache)
    async with caches_in(tmp_path, key_file=key_file) as caches:
        caches.restore()
        assert all(not sessions_of(cache) for cache in caches)
        assert caches.secrets.keys.tenants == ()


async def test_the_history_of_its_sessions_is_forgotten(tmp_path, key_file):
    """Events contain session ids, which may be anything."""
    async with caches_in(tmp_path, key_file=key_file) as caches:
        caches.restore()
        cache, _ = await caches.open(LAYOUT)
        store(cache, tenant="a")
        hub = EventHub(1)
        for tenant in ("a", "b"):
            hub.publish(Emit("session_cut", key_of("secret", tenant)))
        await TenantEraser(caches, hub).erase("a")
        left = hub.recent(EventFilter(), 10)
        assert [event.session.tenant for event in left if event.HasField("session")] == ["b"]


async def test_without_a_key_erasing_is_refused(tmp_path):
    """It is refused before any session is dropped."""
    async with caches_in(tmp_path) as caches:
        caches.restore()
        cache, _ = await caches.open(LAYOUT)
        key = store(cache)
        with pytest.raises(NotErasableError, match="the SSD tier is not encrypted"):
            await TenantEraser(caches, EventHub(1)).erase("default")
        assert sessions_of(cache) == {key}


async def test_a_tenant_without_a_key_counts_as_erased(tmp_path, key_file):
    """It has no block either."""
    async with caches_in(tmp_path, key_file=key_file) as caches:
        caches.restore()
        eraser = TenantEraser(caches, EventHub(1))
        assert eraser.tenants_to_erase("nobody") == ()
        erased = await eraser.erase("nobody")
        assert (erased.tenants, erased.num_sessions, erased.freed_bytes) == ((), 0, 0)


async def test_possibly_plain_blocks_cannot_be_erased_by_one_tenants_key(tmp_path, key_file):
    """Erasing all tenants removes their segments."""
    async with caches_in(tmp_path) as caches:
        caches.restore()
        cache, _ = await caches.open(LAYOUT)
        store(cache, tenant="a")
        async with asyncio.timeout(30):
            while not has_segments(tmp_path / VOLUMES):  # noqa: ASYNC110  # it is written meanwhile
                await asyncio.sleep(0.01)
        await caches.wait_until_committed()
    async with caches_in(tmp_path, key_file=key_file) as caches:
        caches.restore()
        eraser = TenantEraser(caches, EventHub(1))
        with pytest.raises(NotErasableError, match="unencrypted blocks"):
            await eraser.erase("a")
        await eraser.erase(None)
        assert not caches.secrets.info().may_have_plain
        assert eraser.tenants_to_erase("a") == ()
