"""New limits while the cache runs: it ends up where a restart with them would."""

import gc
from dataclasses import replace

import pytest

from kvd.core.operations import reconfiguring
from kvd.core.operations.reconfiguring import DROP_BATCH, RESCHEDULE_BATCH
from kvd.core.records.actions import WriteBlock
from kvd.core.records.entries import TTL_NEVER_NS, Pin
from kvd.core.records.errors import TooManyLeasesError
from kvd.core.records.tier import Admission
from kvd.core.state.limits import TenantLimits
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    load,
    new_world,
    prepare_load,
    store,
)
from tests.property.cache_world import LAYOUT, MODEL, CacheWorld, to_bytes


def relimit(world: CacheWorld, **changed) -> None:
    """Change limits, and process the consequences without letting time pass."""
    world.limits = replace(world.limits, **changed)
    world.engine.set_limits(world.limits)
    world.pump()
    while (due_ns := world.engine.next_deadline_ns()) is not None and due_ns <= world.now_ns:
        world.engine.expire()
        world.pump()


def is_stored(world: CacheWorld, key: SessionKey) -> bool:
    return world.engine.inspection.info(key) is not None


def test_a_shorter_ttl_applies_to_stored_sessions():
    """Each expires by the new one after its last use; a tenant's TTL applies to its sessions."""
    world = new_world(default_ttl_ns=None)
    store(world, A, ONES)
    store(world, OTHER_TENANT, ONES)
    ten = TenantLimits(ttl_ns=10)
    relimit(world, default_ttl_ns=100, tenant_limits=lambda t: ten if t == "a" else TenantLimits())
    assert world.engine.next_deadline_ns() == world.now_ns + 10
    world.now_ns += 10
    relimit(world)
    assert not is_stored(world, A)
    assert is_stored(world, OTHER_TENANT)
    assert world.engine.inspection.info(OTHER_TENANT).expires_at_ns == world.now_ns + 90


def test_a_longer_ttl_keeps_sessions_that_would_have_expired():
    """A session whose old TTL has not passed stays; a session's own TTL is not changed."""
    world = new_world(default_ttl_ns=100)
    store(world, A, ONES)
    store(world, B, TWOS)
    world.engine.sessions.set_ttl(B, 100)
    relimit(world, default_ttl_ns=1000, tenant_limits=lambda _: TenantLimits())
    world.now_ns += 500
    world.engine.expire()
    world.pump()
    assert is_stored(world, A)
    assert not is_stored(world, B)
    relimit(world, tenant_limits=lambda _: TenantLimits(ttl_ns=TTL_NEVER_NS))
    world.now_ns += 10**6
    relimit(world)
    assert is_stored(world, A)


def test_many_sessions_are_rescheduled_in_bounded_steps():
    """A call examines RESCHEDULE_BATCH of them, and the rest follows."""
    num_sessions = RESCHEDULE_BATCH + 10
    world = new_world(num_slots=1, num_extents=8)
    store(world, A, ONES)
    for index in range(1, num_sessions):  # they share their block: there is nothing to write
        key = SessionKey("a", MODEL, str(index))
        world.engine.stores.prepare(key, to_bytes(ONES), 0, ENGINE_ID)
    world.pump()
    assert world.engine.inspection.stats().num_sessions == num_sessions
    world.limits = replace(world.limits, default_ttl_ns=100)
    world.engine.set_limits(world.limits)
    assert world.engine.next_deadline_ns() == world.now_ns
    relimit(world)
    assert world.engine.next_deadline_ns() == world.now_ns + 100


def test_fewer_sessions_keep_the_warmest():
    """max_sessions applies at once, except to pinned sessions; batch by batch."""
    world = new_world(num_slots=4, num_extents=256, max_sessions=DROP_BATCH * 2)
    keys = [SessionKey("a", MODEL, str(index)) for index in range(DROP_BATCH + 5)]
    for key in keys:
        store(world, key, ONES)
    world.engine.sessions.pin(keys[0], Pin.HARD)
    world.engine.set_limits(replace(world.limits, max_sessions=2))
    assert world.engine.inspection.stats().num_sessions == 5, "a batch is gone at once"
    relimit(world, max_sessions=2)
    assert [key for key in keys if is_stored(world, key)] == [keys[0], keys[-1]]


def test_a_new_quota_counts_stored_blocks():
    """The tenant's coldest session gives way to its next blocks; others are not touched."""
    world = new_world()
    for key, tokens in ((A, ONES), (B, TWOS), (OTHER_TENANT, ONES)):
        world.now_ns += 1
        store(world, key, tokens)
    two = TenantLimits(quota_bytes=2 * LAYOUT.block_bytes)
    relimit(world, tenant_limits=lambda t: two if t == "a" else TenantLimits())
    assert is_stored(world, A)
    store(world, C, THREES)
    assert [is_stored(world, key) for key in (A, B, C, OTHER_TENANT)] == [False, True, True, True]


def test_a_new_quota_takes_effect_in_bounded_steps(monkeypatch):
    """It limits nothing until all sessions are sorted; those used since are the warmest."""
    monkeypatch.setattr(reconfiguring, "RESCHEDULE_BATCH", 3)
    world = new_world(num_slots=32)
    keys = [SessionKey("a", MODEL, str(number)) for number in range(8)]
    for number, key in enumerate(keys):
        world.now_ns += 1
        store(world, key, [number] * 4)
    quota = TenantLimits(quota_bytes=8 * LAYOUT.block_bytes)
    world.limits = replace(world.limits, tenant_limits=lambda _: quota)
    world.engine.set_limits(world.limits)
    num_steps = 0
    while (due_ns := world.engine.next_deadline_ns()) is not None and due_ns <= world.now_ns:
        world.engine.check()
        if num_steps == 0:
            load(world, keys[1], [1] * 4)
        if num_steps == 3:
            world.engine.sessions.flush(keys[5], dry_run=False)
            load(world, keys[2], [2] * 4)
        if num_steps == 1:
            store(world, SessionKey("a", MODEL, "new"), [9] * 4)
        world.engine.expire()
        num_steps += 1
    assert num_steps >= 2 * len(keys) // 3
    world.engine.check()
    kept = []
    for token in range(10, 14):
        store(world, SessionKey("a", MODEL, f"later-{token}"), [token] * 4)
        kept.append([key.session_id for key in keys if is_stored(world, key)])
    assert kept == [list("123467"), list("12467"), list("1267"), list("127")]


def test_sessions_that_wait_for_a_quota_are_no_garbage_collector_work(monkeypatch):
    """Its passes would stop every engine for longer, the more sessions have to be sorted."""
    monkeypatch.setattr(reconfiguring, "RESCHEDULE_BATCH", 64)
    world = new_world(num_slots=256)
    for number in range(150):
        store(world, SessionKey("a", MODEL, str(number)), [number] * 4)
    quota = TenantLimits(quota_bytes=256 * LAYOUT.block_bytes)
    limits = replace(world.limits, tenant_limits=lambda _: quota)
    gc.freeze()
    num_before = len(gc.get_objects())
    world.engine.set_limits(limits)
    world.engine.expire()
    assert len(gc.get_objects()) - num_before < 64


def test_a_new_quota_respects_pins_and_ends():
    """An ended session goes first, a soft-pinned one last, a hard-pinned one never."""
    world = new_world()
    keys = [SessionKey("a", MODEL, name) for name in ("hard", "soft", "idle", "ended")]
    for token, key in enumerate(keys):
        world.now_ns += 1
        store(world, key, [token] * 4)
    world.engine.sessions.pin(keys[0], Pin.HARD)
    world.engine.sessions.pin(keys[1], Pin.SOFT)
    world.engine.sessions.end(keys[3])
    relimit(world, tenant_limits=lambda _: TenantLimits(quota_bytes=4 * LAYOUT.block_bytes))
    kept = []
    for token in range(10, 13):
        store(world, SessionKey("a", MODEL, str(token)), [token] * 4)
        kept.append([key.session_id for key in keys if is_stored(world, key)])
    assert kept == [["hard", "soft", "idle"], ["hard", "soft"], ["hard", "soft"]]


def test_a_quota_that_ends_limits_nothing():
    """A store that was refused before is granted."""
    one = TenantLimits(quota_bytes=LAYOUT.block_bytes)
    world = new_world(tenant_limits=lambda _: one)
    assert store(world, A, ONES + TWOS).refused == "quota"
    relimit(world, tenant_limits=lambda _: TenantLimits())
    assert not store(world, A, ONES + TWOS).refused


@pytest.mark.parametrize("before", [Admission.ON_EVICT, Admission.WRITE_BACK])
def test_write_through_writes_waiting_blocks(before):
    """Blocks that waited for an eviction, or for their session to rest, are written at once."""
    world = new_world(admission=before, write_back_delay_ns=10**9)
    store(world, A, ONES)
    assert not world.engine.inspection.stats().tiers[1].num_blocks
    relimit(world, admission=Admission.WRITE_THROUGH)
    assert any(isinstance(io, WriteBlock) for io in world.io.values())
    world.quiesce()
    assert world.engine.inspection.stats().tiers[1].num_blocks == 1


def test_a_shorter_rest_writes_back_sooner():
    """write_back_after applies to blocks that rest already."""
    world = new_world(admission=Admission.WRITE_BACK, write_back_delay_ns=10**9)
    store(world, A, ONES)
    relimit(world, write_back_delay_ns=50)
    assert world.engine.next_deadline_ns() == world.now_ns + 50


def test_a_higher_watermark_takes_effect_at_once():
    """Clean blocks go until so many slots are free."""
    world = new_world(num_slots=10)
    for token in range(10):
        store(world, SessionKey("a", MODEL, str(token)), [token] * 4)
    assert world.engine.inspection.stats().tiers[0].num_blocks == 10
    relimit(world, watermark=0.3)
    assert world.engine.inspection.stats().tiers[0].num_blocks == 7


def test_fewer_leases_apply_to_new_ones():
    """Existing leases continue."""
    world = new_world()
    store(world, A, ONES)
    leases = [prepare_load(world, A, ONES) for _ in range(3)]
    relimit(world, max_leases=2)
    with pytest.raises(TooManyLeasesError):
        prepare_load(world, A, ONES)
    for lease in leases:
        world.engine.loads.complete(lease.lease_id, 1)
    prepare_load(world, A, ONES)
