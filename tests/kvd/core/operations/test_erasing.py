"""Erasing a tenant: its calls are refused, nothing of it is left or returns, others continue."""

import pytest

from kvd.core.operations import erasing
from kvd.core.operations.erasing import LOOKED_AT
from kvd.core.records.actions import IoOutcome, ReadBlock, SpaceFreed, WipeSlots, WriteBlock
from kvd.core.records.entries import Pin
from kvd.core.records.errors import ErasingError, LeaseLostError
from kvd.core.records.records import StoreAnswer
from shared.types.granted_slots import Lookup
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    OTHER_TENANT,
    TWOS,
    A,
    B,
    complete_store,
    counter,
    load,
    new_world,
    prepare_load,
    prepare_store,
    store,
)
from tests.property.cache_world import LAYOUT, to_bytes


def is_a(tenant: str) -> bool:
    return tenant == A.tenant


def begin(world):
    world.engine.erasing.begin(is_a)
    world.pump()


def drop(world, max_sessions=10):
    answer = world.engine.erasing.step(max_sessions)
    world.pump()
    return answer


def test_a_tenant_is_removed_from_every_tier():
    """Pinned sessions and their rows as well; the other tenant's sessions stay where they are."""
    world = new_world()
    for key in (A, B, OTHER_TENANT):
        store(world, key, [*ONES, len(key.session_id)])
    world.engine.sessions.pin(B, Pin.HARD)
    begin(world)
    assert drop(world, max_sessions=1).num_sessions == 1
    assert not world.engine.erasing.is_gone()
    assert drop(world).num_sessions == 1
    world.quiesce()
    assert world.engine.erasing.is_gone()
    assert list(world.index.sessions) == [OTHER_TENANT]
    assert [usage.tenant for usage in world.engine.inspection.tenants] == [OTHER_TENANT.tenant]
    assert load(world, OTHER_TENANT, ONES).end_token == 4


def test_other_tenants_sessions_are_skipped_in_bounded_steps():
    """A call examines so many sessions, however few are the tenant's.

    All are dropped in the end.
    """
    world = new_world(num_slots=4, num_extents=256)
    for number in range(2 * LOOKED_AT):
        store(world, OTHER_TENANT._replace(session_id=str(number)), [number, *ONES[1:]])
    store(world, A, ONES)
    begin(world)
    dropped = []
    while world.engine.erasing.has_unvisited:
        dropped.append(drop(world, max_sessions=1).num_sessions)
    assert sum(dropped) == 1
    assert dropped[:2] == [0, 0]
    assert world.engine.erasing.is_gone()


def test_a_tenants_calls_are_refused_during_the_erasure():
    """Loads, stores and discards may be retried; others' calls work. Afterwards all do."""
    world = new_world()
    store(world, A, ONES)
    begin(world)
    for call in (
        lambda: prepare_load(world, A, ONES),
        lambda: prepare_store(world, A, ONES),
        lambda: world.engine.sessions.discard(A, to_bytes(ONES), [(0, 1)]),
    ):
        with pytest.raises(ErasingError) as refused:
            call()
        assert refused.value.retryable
    store(world, OTHER_TENANT, ONES)
    drop(world)
    world.engine.erasing.end()
    store(world, A, TWOS)
    assert load(world, A, TWOS).end_token == 4


def test_an_active_load_is_lost():
    """Its completion fails, so that the copied rows are not trusted, whether it waited or not."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    store(world, OTHER_TENANT, ONES + TWOS)
    waits = prepare_load(world, A, ONES + TWOS)
    assert waits.lookup is Lookup.PENDING
    begin(world)
    with pytest.raises(LeaseLostError):
        world.engine.loads.settle(waits.lease_id)
    with pytest.raises(LeaseLostError):
        world.engine.loads.complete(waits.lease_id, ENGINE_ID)
    drop(world)
    assert not world.engine.erasing.is_gone()
    world.finish_all(ReadBlock)
    world.quiesce()
    assert world.engine.erasing.is_gone()


def test_an_active_store_publishes_nothing():
    """Its engine keeps the slots until it completes; the session is not stored."""
    world = new_world()
    store(world, A, ONES)
    answer = prepare_store(world, A, ONES + TWOS, from_token=4)
    begin(world)
    drop(world)
    world.quiesce()
    assert world.engine.erasing.is_gone()
    world.engine.erasing.wipe()
    world.pump()
    world.quiesce()
    assert world.slots[answer.blocks[0].slot_id]
    world.engine.erasing.end()
    assert complete_store(world, answer) == 0
    world.quiesce()
    assert load(world, A, ONES + TWOS).miss_reason == "unknown_session"
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0


def test_an_active_write_is_waited_for():
    """Until it ends the tenant is not erased: its key may be in use."""
    world = new_world()
    store(world, A, ONES, settle=False)
    assert world.io_of(WriteBlock)
    begin(world)
    drop(world)
    assert not world.engine.erasing.is_gone()
    world.finish_all(WriteBlock)
    world.quiesce()
    assert world.engine.erasing.is_gone()
    assert not world.index.blocks


def test_uncommitted_rows_are_erased():
    """A session dropped just before is erased at once: later actions follow its rows."""
    world = new_world(default_ttl_ns=10)
    store(world, A, ONES)
    world.now_ns += 20
    world.engine.expire()
    begin(world)
    assert world.engine.erasing.is_gone()
    assert list(world.index.sessions) == [A]
    world.commit(len(world.index.uncommitted))  # as before the keys are dropped
    assert not world.index.sessions
    assert not world.index.blocks


def test_free_memory_is_zeroed():
    """Free slots of others as well; used slots stay, and slots being wiped cannot be granted."""
    world = new_world(num_slots=4)
    for key in (A, OTHER_TENANT):
        store(world, key, ONES)
    begin(world)
    drop(world)
    world.engine.erasing.wipe()
    world.pump()
    assert world.engine.erasing.is_wiping()
    prepare_load(world, OTHER_TENANT, ONES)  # its slot cannot be granted
    assert prepare_store(world, OTHER_TENANT, ONES + TWOS, from_token=4).refused == "wait"
    world.finish_all(WipeSlots)
    assert not world.engine.erasing.is_wiping()
    assert sorted(map(len, world.slots)) == [0, 0, 0, 4]
    store(world, OTHER_TENANT, ONES + TWOS)
    assert load(world, OTHER_TENANT, ONES + TWOS).end_token == 8


def test_nothing_is_evicted_while_free_memory_is_zeroed():
    """Slots that are being zeroed are free again in a moment: the watermark waits for them."""
    world = new_world(num_slots=4, num_extents=8, watermark=0.5)
    for key in (A, OTHER_TENANT):
        store(world, key, ONES)
    world.quiesce()
    begin(world)
    drop(world)
    world.quiesce()
    world.engine.erasing.wipe()
    world.pump()
    assert world.engine.erasing.is_wiping()
    world.finish_all(WipeSlots)
    world.quiesce()
    assert sorted(map(len, world.slots)) == [0, 0, 0, 4]
    assert counter(world, "evictions_dram") == 0


def test_what_cannot_be_zeroed_is_reported():
    """The slots come back; that they are not clean is known."""
    world = new_world()
    begin(world)
    world.engine.erasing.wipe()
    world.pump()
    world.finish_all(WipeSlots, IoOutcome.TRANSIENT)
    assert not world.engine.erasing.is_wiping()
    assert not world.engine.erasing.is_wiped()


def test_free_memory_is_wiped_in_steps(monkeypatch):
    """Each slot that was free is wiped once; wiped slots come behind the others."""
    monkeypatch.setattr(erasing, "WIPE_BYTES", 2 * LAYOUT.block_bytes)
    world = new_world(num_slots=6)
    store(world, OTHER_TENANT, ONES)
    begin(world)
    world.engine.erasing.wipe()
    world.pump()
    wiped = []
    while world.engine.erasing.is_wiping():
        (op_id,) = world.io_of(WipeSlots)
        wiped.append(world.io[op_id].slot_ids)
        world.finish_io(op_id)
    assert [len(slot_ids) for slot_ids in wiped] == [2, 2, 1]
    assert len({slot_id for slot_ids in wiped for slot_id in slot_ids}) == 5
    assert world.engine.erasing.is_wiped()


def test_a_slot_of_a_store_that_is_aborted_meanwhile_is_wiped(monkeypatch):
    """It was free when the wipe began, and its engine has overwritten nothing."""
    monkeypatch.setattr(erasing, "WIPE_BYTES", 2 * LAYOUT.block_bytes)
    world = new_world(num_slots=6)
    begin(world)
    world.engine.erasing.wipe()
    world.pump()
    answer = world.engine.stores.prepare(OTHER_TENANT, to_bytes(ONES), 0, ENGINE_ID)
    wiped = []
    while world.engine.erasing.is_wiping():
        (op_id,) = world.io_of(WipeSlots)
        wiped += world.io[op_id].slot_ids
        world.finish_io(op_id)
        if answer.lease_id:
            complete_store(world, answer, success=False)
            answer = StoreAnswer()
    assert sorted(wiped) == list(range(6))


@pytest.mark.parametrize("success", [True, False])
def test_a_slot_that_an_engine_fills_is_wiped_when_it_comes_back(success):
    """It has the erased tenant's KV, which an outdated store does not publish."""
    world = new_world(num_slots=4)
    answer = prepare_store(world, A, ONES)
    begin(world)
    drop(world)
    world.engine.erasing.wipe()
    world.pump()
    world.finish_all(WipeSlots)
    assert not world.engine.erasing.is_wiping()
    world.engine.erasing.end()
    assert sorted(map(len, world.slots)) == [0, 0, 0, 4]
    complete_store(world, answer, success=success)
    world.quiesce()
    assert world.slots == [[]] * 4
    assert world.engine._state.slots.num_free == 4


def test_another_tenants_slot_is_wiped_once_it_is_evicted():
    """It was being filled: behind its last row there may be older bytes. The arena waits for it."""
    world = new_world(num_slots=2)
    answer = prepare_store(world, OTHER_TENANT, ONES)
    begin(world)
    world.engine.erasing.wipe()
    world.pump()
    world.finish_all(WipeSlots)
    complete_store(world, answer)
    world.quiesce()
    assert not world.engine.release_dram()
    world.pump()
    world.finish_all(WipeSlots)
    assert world.slots == [[], []]
    assert world.engine.release_dram()
    world.engine.drop_slots()


def test_a_slot_that_cannot_be_zeroed_is_not_forgotten(monkeypatch):
    """Even if all others can; the next wipe starts over."""
    monkeypatch.setattr(erasing, "WIPE_BYTES", 1)
    world = new_world(num_slots=3)
    begin(world)
    for outcomes, is_wiped in (("TOO", False), ("OOO", True)):
        world.engine.erasing.wipe()
        for outcome in outcomes:
            world.pump()
            kind = IoOutcome.TRANSIENT if outcome == "T" else IoOutcome.OK
            world.finish_io(world.io_of(WipeSlots)[0], kind)
        assert not world.engine.erasing.is_wiping()
        assert world.engine.erasing.is_wiped() is is_wiped
    assert world.engine._state.slots.num_free == 3


def test_waiting_stores_are_notified_when_slots_are_wiped():
    """The slots are free again."""
    world = new_world(num_slots=1)
    begin(world)
    world.engine.erasing.wipe()
    world.pump()
    assert prepare_store(world, OTHER_TENANT, ONES).refused == "wait"
    world.events.clear()
    world.finish_all(WipeSlots)
    assert world.events == [SpaceFreed()]


def test_another_tenants_leases_stay_valid():
    """Its loads and stores are neither released nor voided."""
    world = new_world()
    store(world, OTHER_TENANT, ONES)
    loading = prepare_load(world, OTHER_TENANT, ONES)
    storing = prepare_store(world, OTHER_TENANT, ONES + TWOS, from_token=4)
    begin(world)
    world.engine.loads.complete(loading.lease_id, ENGINE_ID)
    assert complete_store(world, storing) == 8
