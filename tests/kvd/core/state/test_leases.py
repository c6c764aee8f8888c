"""Leases: connections that end, engines that come back, slots that stay quarantined."""

import pytest

from kvd.core.records.actions import OWNER_REATTACHED, Emit
from kvd.core.records.errors import LeaseLostError
from kvd.core.records.records import LeaseState
from kvd.core.state.leases import StoreLease, move
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
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
from tests.property.cache_world import ADOPTED_ENGINES, to_bytes

BACK = 7  # the engine's id after it came back


def test_leases_are_listed():
    """Kind, engine, session, slots and age of each."""
    world = new_world(num_slots=3)
    store(world, A, ONES)
    world.now_ns += 5
    loading, storing = prepare_load(world, A, ONES), prepare_store(world, B, TWOS + THREES)
    infos = world.engine.inspection.leases()
    assert [(i.lease_id, i.kind, i.engine_id, i.key, i.num_slots) for i in infos] == [
        (loading.lease_id, "load", ENGINE_ID, A, 1),
        (storing.lease_id, "store", ENGINE_ID, B, 2),
    ]
    assert {info.since_ns for info in infos} == {world.now_ns}
    assert not any(info.is_pending or info.is_orphan for info in infos)


def test_a_detached_engine_keeps_the_slots_it_may_be_writing():
    """Its loads end, its stores become orphans; their slots are not reused."""
    world = new_world(num_slots=2, num_extents=0)
    store(world, A, ONES)
    loading, storing = prepare_load(world, A, ONES), prepare_store(world, B, TWOS)
    world.engine.engines.detach(ENGINE_ID)
    world.pump()
    assert world.engine.loads.state_of(loading.lease_id) is LeaseState.LOST
    assert [(i.lease_id, i.is_orphan) for i in world.engine.inspection.leases()] == [
        (storing.lease_id, True)
    ]
    stats = world.engine.inspection.stats()
    assert (stats.num_orphan_leases, stats.num_quarantined_slots) == (1, 1)
    slot_ids = {block.slot_id for block in prepare_store(world, A, THREES).blocks}
    assert slot_ids.isdisjoint(block.slot_id for block in storing.blocks)


def test_an_engine_that_comes_back_completes_its_store():
    """The lease gets its new id; leases that it does not name are released."""
    world = new_world()
    kept, dropped = prepare_store(world, A, ONES), prepare_store(world, B, TWOS)
    world.engine.engines.detach(ENGINE_ID)
    held = [kept.lease_id, 99]
    assert world.engine.engines.reattach(ENGINE_ID, BACK, held) == ((kept.lease_id,), (99,))
    world.pump()
    assert world.events[-1] == Emit(
        OWNER_REATTACHED, None, {"owner": str(BACK), "num_confirmed": "1", "num_lost": "1"}
    )
    assert world.engine.inspection.stats().num_orphan_leases == 0
    assert {record.engine_id for record in world.journal.values()} == {BACK}
    with pytest.raises(LeaseLostError):
        world.engine.stores.complete(dropped.lease_id, BACK, success=True)
    assert world.engine.stores.complete(kept.lease_id, BACK, success=True) == 4
    world.pump()
    world.quiesce()
    assert load(world, A, ONES).end_token == 4


def test_a_dead_orphan_is_released():
    """When the process is gone, its slots are free."""
    world = new_world()
    prepare_store(world, A, ONES)
    world.engine.engines.detach(ENGINE_ID)
    world.engine.engines.remove(ENGINE_ID)
    world.pump()
    stats = world.engine.inspection.stats()
    assert (stats.num_leases, stats.num_quarantined_slots) == (0, 0)
    assert stats.tiers[0].used_bytes == 0
    assert not world.journal
    names = [event.name for event in world.events if isinstance(event, Emit)]
    assert names[-2:] == ["owner_detached", "owner_gone"]


def test_an_engine_may_come_back_before_its_old_connection_has_ended():
    """There was no detach; its loads end as well."""
    world = new_world()
    store(world, A, ONES)
    loading = prepare_load(world, A, ONES)
    assert world.engine.engines.reattach(ENGINE_ID, BACK, [loading.lease_id]) == (
        (),
        (loading.lease_id,),
    )
    assert world.engine.inspection.stats().num_leases == 0


def test_slots_granted_by_an_earlier_kvd_stay_with_their_writers():
    """The engine lives: they are not reused until it completes, which fails."""
    world = new_world(num_slots=3, num_extents=0)
    answer = prepare_store(world, A, ONES + TWOS)
    world.start(keep_dram=True, alive={ENGINE_ID})
    stats = world.engine.inspection.stats()
    assert (stats.num_orphan_leases, stats.num_quarantined_slots) == (1, 2)
    info = world.engine.inspection.leases()[0]
    assert (info.lease_id, info.key, info.is_orphan) == (answer.lease_id, None, True)
    assert world.engine.stores.prepare(B, to_bytes(THREES * 2), 0, 5).end_token == 4
    held = [answer.lease_id]
    confirmed, lost = world.engine.engines.reattach(ENGINE_ID + ADOPTED_ENGINES, ENGINE_ID, held)
    assert (confirmed, lost) == ((answer.lease_id,), ())
    with pytest.raises(LeaseLostError):
        complete_store(world, answer)
    world.pump()
    assert world.engine.inspection.stats().num_leases == 1
    assert counter(world, "leases_lost") == 1
    assert world.engine.inspection.info(A) is None


def test_lease_ids_are_never_used_twice():
    """A new kvd numbers leases above those an earlier one may have granted."""
    world = new_world()
    before = prepare_store(world, A, ONES)
    world.start(keep_dram=True, alive={ENGINE_ID})
    assert prepare_store(world, A, ONES).lease_id > before.lease_id


def test_a_dead_writer_is_not_restored():
    """A process that is gone writes nothing: its slots are free at once."""
    world = new_world(num_slots=1)
    prepare_store(world, A, ONES)
    world.start(keep_dram=True)
    assert world.engine.inspection.stats().num_leases == 0
    assert len(prepare_store(world, A, ONES).blocks) == 1


def test_a_load_can_be_ended_by_its_engine_only():
    """Another engine that names its lease ends nothing: the engine keeps the slots."""
    world = new_world(num_slots=1)
    store(world, A, ONES)
    answer = prepare_load(world, A, ONES)
    with pytest.raises(LeaseLostError):
        world.engine.loads.complete(answer.lease_id, ENGINE_ID + 1)
    world.pump()
    assert [lease.lease_id for lease in world.engine.inspection.leases()] == [answer.lease_id]
    assert prepare_store(world, B, TWOS).lease_id == 0, "the slot is being read"
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    assert not world.engine.inspection.leases()
    assert store(world, B, TWOS).end_token == 4


def test_a_lease_ends_once():
    """An orphan returns to its engine, or ends; an ended lease belongs to none."""
    lease = StoreLease(1, 2, SessionKey("t", "m", "s"))
    with pytest.raises(AssertionError):
        move(lease, "reattach")
    for event in ("detach", "reattach", "end"):
        move(lease, event)
    for event in ("settle", "detach", "reattach", "end"):
        with pytest.raises(AssertionError, match=f"{event} cannot happen to what is ended"):
            move(lease, event)
