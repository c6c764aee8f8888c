"""What sessions keep over a restart beside their blocks: pins, quotas, order, deadlines."""

from kvd.core.records.entries import TTL_NEVER_NS, Pin
from kvd.core.state.limits import TenantLimits
from tests.kvd.core.turns import (
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    load,
    new_world,
    restart_committed,
    store,
    tiers_of,
)
from tests.property.cache_world import LAYOUT


def test_pins_and_quotas_survive():
    """The kind of pin, the order of ended sessions, and a tenant's charges."""
    limits = TenantLimits(quota_bytes=4 * LAYOUT.block_bytes)
    world = new_world(tenant_limits=lambda _: limits)
    store(world, A, ONES)
    store(world, B, TWOS)
    store(world, C, THREES)
    world.engine.sessions.pin(A, Pin.SOFT)
    world.engine.sessions.end(C)
    world.pump()
    world.commit(len(world.index.uncommitted))
    before = tuple(world.engine.inspection.tenants)
    world.start()
    assert tuple(world.engine.inspection.tenants) == before
    assert world.engine.inspection.stats().num_soft_pins == 1
    fourth = A._replace(session_id="d")
    store(world, fourth, [7] * 8)
    assert world.engine.inspection.info(C) is None, "the ended session goes first"
    store(world, fourth, [7] * 12)
    assert world.engine.inspection.info(B) is None, "then the other one that is not pinned"
    assert world.engine.inspection.info(A) is not None


def test_order_of_last_access_survives():
    """After a restart the coldest session is still the first victim on SSD."""
    world = new_world(num_slots=4, num_extents=2)
    for key, tokens in ((A, ONES), (B, TWOS)):
        world.now_ns += 1
        store(world, key, tokens)
    world.now_ns += 1
    load(world, A, ONES)
    restart_committed(world)
    store(world, C, THREES)
    assert world.engine.inspection.info(B) is None
    assert tiers_of(world, A) == ["S"]


def test_pins_of_both_kinds_are_counted_after_a_start():
    """A hard-pinned session is no victim; a soft-pinned one is the last."""
    world = new_world()
    for key, pin in ((A, Pin.SOFT), (B, Pin.HARD), (C, Pin.NONE)):
        store(world, key, ONES)
        world.engine.sessions.pin(key, pin)
    engine = restart_committed(world)
    stats = engine.inspection.stats()
    assert (stats.num_soft_pins, stats.num_hard_pins) == (1, 1)
    assert list(engine._state.policy.victims(None, world.now_ns)) == [C, A]


def test_the_orders_of_tenants_with_a_quota_survive():
    """By last use, ended sessions first, soft-pinned ones last, hard-pinned ones not at all."""
    quota = TenantLimits(quota_bytes=1 << 30)
    world = new_world(tenant_limits=lambda _: quota)
    keys = [A._replace(session_id=name) for name in "abcde"]
    for key in keys:
        world.now_ns += 1
        store(world, key, ONES)
    world.engine.sessions.pin(keys[0], Pin.SOFT)
    world.engine.sessions.pin(keys[1], Pin.HARD)
    world.engine.sessions.end(keys[3])
    engine = restart_committed(world)
    order = engine._state.tenants.order_of(A.tenant)
    assert list(order) == [keys[3], keys[2], keys[4], keys[0]]
    assert list(engine._state.policy.victims(None, world.now_ns)) == list(order)


def test_deadlines_survive():
    """A session's own TTL, its tenant's, the default, or none; a pin stops the clock."""
    tenants = {OTHER_TENANT.tenant: TenantLimits(ttl_ns=50)}
    world = new_world(
        default_ttl_ns=100, tenant_limits=lambda tenant: tenants.get(tenant, TenantLimits())
    )
    for key in (A, B, C, OTHER_TENANT):
        store(world, key, ONES)
    world.engine.sessions.set_ttl(A, 20)
    world.engine.sessions.set_ttl(B, TTL_NEVER_NS)
    for elapsed_ns, gone in ((20, A), (30, OTHER_TENANT), (50, C)):
        engine = restart_committed(world)
        assert engine.next_deadline_ns() == world.now_ns + elapsed_ns
        world.now_ns += elapsed_ns
        world.engine.expire()
        assert world.engine.inspection.info(gone) is None
    assert restart_committed(world).next_deadline_ns() is None
    assert world.engine.inspection.keys() == [B]


def test_the_mean_size_of_a_session_is_known_after_a_start():
    """The windows of the queue are based on it."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES)
    store(world, B, [7] * 4)
    mean_bytes = restart_committed(world).inspection.queue_stats().mean_session_bytes
    assert mean_bytes == 2 * world.engine.layout.block_bytes
