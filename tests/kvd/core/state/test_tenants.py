"""Quotas: what is charged, which sessions give way, which stores are refused."""

import pytest

from kvd.core.records.entries import Pin
from kvd.core.records.records import TenantUsage
from kvd.core.state.limits import TenantLimits
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    complete_store,
    counter,
    load,
    new_world,
    prepare_load,
    prepare_store,
    queue_of,
    store,
)
from tests.property.cache_world import LAYOUT, CacheWorld, to_bytes

BLOCK = LAYOUT.block_bytes


def quota_world(num_blocks: int, **limits) -> CacheWorld:
    """Make a world in which tenant "a" may have this many blocks, others any number."""
    of_a = TenantLimits(quota_bytes=num_blocks * BLOCK)
    return new_world(tenant_limits=lambda t: of_a if t == "a" else TenantLimits(), **limits)


def used_blocks(world: CacheWorld, tenant: str = "a") -> int:
    return sum(u.used_bytes for u in world.engine.inspection.tenants if u.tenant == tenant) // BLOCK


def stored_tokens_of_all(world: CacheWorld) -> list[int]:
    """Return the stored tokens of A, B and C."""
    infos = [world.engine.inspection.info(key) for key in (A, B, C)]
    return [info.num_tokens if info else 0 for info in infos]


def test_usage_counts_each_block_once():
    """Shared or not, in one tier or two, partial or full; by tenant."""
    world = quota_world(9)
    store(world, A, ONES + TWOS)
    store(world, B, [*ONES, 2])
    store(world, OTHER_TENANT, ONES)
    assert set(world.engine.inspection.tenants) == {
        TenantUsage("a", 3 * BLOCK, 9 * BLOCK, 2),
        TenantUsage("other", BLOCK, None, 1),
    }
    world.engine.sessions.flush(None, dry_run=False)
    assert tuple(world.engine.inspection.tenants) == ()


def test_slots_are_charged_from_the_grant():
    """A store that fails, or that another one overtakes, gives its charge back."""
    world = quota_world(9)
    first = prepare_store(world, A, ONES + TWOS)
    second = prepare_store(world, B, ONES)
    assert used_blocks(world) == 3
    complete_store(world, first)
    complete_store(world, second)
    assert used_blocks(world) == 2
    failed = prepare_store(world, C, THREES)
    assert used_blocks(world) == 3
    complete_store(world, failed, success=False)
    assert used_blocks(world) == 2


def test_the_tenants_coldest_session_gives_way():
    """Its tail goes, no more than is needed; other tenants are not touched."""
    world = quota_world(4, num_slots=8)
    store(world, OTHER_TENANT, ONES)
    store(world, A, ONES + TWOS)
    store(world, B, THREES + TWOS)
    store(world, C, TWOS)
    assert stored_tokens_of_all(world) == [4, 8, 4]
    load(world, A, ONES)
    store(world, C, TWOS + THREES + ONES)
    assert stored_tokens_of_all(world) == [4, 0, 12]
    assert world.engine.inspection.info(OTHER_TENANT) is not None
    assert (counter(world, "evictions_quota"), counter(world, "sessions_dropped")) == (3, 1)


def test_packed_sessions_give_way_too():
    """Sessions on SSD only are charged, and give way, like the others."""
    world = quota_world(3)
    store(world, A, ONES + TWOS)
    world.start()
    assert used_blocks(world) == 2
    store(world, B, THREES + TWOS)
    assert stored_tokens_of_all(world) == [4, 8, 0]
    store(world, B, THREES + TWOS + ONES)
    assert stored_tokens_of_all(world) == [0, 12, 0]


def test_leased_queued_and_hard_pinned_sessions_do_not_give_way():
    """The store is refused instead; soft-pinned ones go when the others do not suffice."""
    world = quota_world(3)
    store(world, A, ONES)
    store(world, B, TWOS)
    world.engine.sessions.pin(A, Pin.SOFT)
    lease = prepare_load(world, B, TWOS)
    answer = prepare_store(world, C, THREES + ONES)
    complete_store(world, answer)
    assert stored_tokens_of_all(world) == [0, 4, 8]
    world.engine.sessions.pin(C, Pin.HARD)
    refused = prepare_store(world, A, ONES)
    assert (refused.refused, refused.lease_id) == ("quota", 0)
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(B))
    assert prepare_store(world, A, ONES).refused == "quota"
    world.engine.engines.replace_queue(ENGINE_ID, queue_of())
    assert not prepare_store(world, A, ONES).refused
    assert counter(world, "stores_refused") == 2


def test_a_store_that_can_never_fit_evicts_nothing():
    """A store larger than the quota is refused before any session goes."""
    world = quota_world(2)
    store(world, A, ONES)
    assert prepare_store(world, B, TWOS + THREES + ONES).refused == "quota"
    assert stored_tokens_of_all(world) == [4, 0, 0]


def test_a_block_leased_elsewhere_is_not_freed_by_a_cut():
    """It stays, and so do the blocks before it."""
    world = quota_world(2)
    store(world, A, ONES + TWOS)
    other = A._replace(session_id="fork")
    lease = world.engine.loads.prepare(other, to_bytes(ONES + TWOS), 0, ENGINE_ID)
    world.pump()
    assert prepare_store(world, B, THREES).refused == "quota"
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    assert not prepare_store(world, B, THREES).refused
    assert stored_tokens_of_all(world)[0] == 4


@pytest.mark.parametrize("shared", [ONES, ONES + TWOS])
def test_sessions_that_share_all_blocks_go_together(shared):
    """A block counts once, and is free once its last session has gone."""
    world = quota_world(len(shared) // 4)
    store(world, A, shared)
    store(world, B, shared)
    store(world, C, THREES)
    assert world.engine.inspection.info(C).num_tokens == 4
    assert used_blocks(world) <= len(shared) // 4
