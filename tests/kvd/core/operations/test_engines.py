"""What engines report: that they are gone or back, and their queues."""

from kvd.core.records.actions import OWNER_DETACHED, OWNER_GONE, OWNER_REATTACHED, Emit
from kvd.core.records.records import LeaseState
from shared.types.granted_slots import Lookup
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    TWOS,
    A,
    B,
    C,
    new_world,
    prepare_load,
    prepare_store,
    queue_of,
    store,
)
from tests.queue_changes import queue_change

NEW_ID = 2


def world_with_leases():
    """Let the engine load one session and store another; return both answers."""
    world = new_world()
    store(world, A, ONES)
    return world, prepare_load(world, A, ONES), prepare_store(world, B, TWOS)


def events_of(world, call):
    """Return the fields of the events that a call emits, by name."""
    world.pump()
    world.events.clear()
    call()
    world.pump()
    return {event.name: event.fields for event in world.events if isinstance(event, Emit)}


def leases(world):
    return {lease.lease_id for lease in world.engine.inspection.leases()}


def test_a_dead_engine_holds_nothing():
    """Its slots are free, and its queue is forgotten."""
    world, loading, storing = world_with_leases()
    engine = world.engine
    engine.engines.replace_queue(ENGINE_ID, queue_of(A, B))
    assert leases(world) == {loading.lease_id, storing.lease_id}
    found = events_of(world, lambda: engine.engines.remove(ENGINE_ID))
    assert found[OWNER_GONE] == {"owner": str(ENGINE_ID), "num_leases": "2"}
    assert not leases(world)
    assert engine.engines.num_requests(ENGINE_ID) == (0, 0)
    assert engine.loads.state_of(loading.lease_id) is LeaseState.LOST


def test_a_lost_connection_ends_loads_and_keeps_stores():
    """Slots that it may still be writing are not reused until it is back, or dead."""
    world, loading, storing = world_with_leases()
    engine = world.engine
    found = events_of(world, lambda: engine.engines.detach(ENGINE_ID))
    assert found[OWNER_DETACHED] == {"owner": str(ENGINE_ID), "num_quarantined_slots": "1"}
    assert leases(world) == {storing.lease_id}
    assert engine.loads.state_of(loading.lease_id) is LeaseState.LOST
    assert engine.inspection.stats().num_quarantined_slots == 1


def test_an_engine_that_comes_back_keeps_the_stores_that_it_names():
    """Under its new id; stores that are unknown to kvd, or have ended, are lost."""
    world, loading, storing = world_with_leases()
    engine = world.engine
    engine.engines.detach(ENGINE_ID)
    held = (storing.lease_id, loading.lease_id, 999)
    confirmed, lost = engine.engines.reattach(ENGINE_ID, NEW_ID, held)
    assert (confirmed, lost) == ((storing.lease_id,), (loading.lease_id, 999))
    assert engine.stores.complete(storing.lease_id, NEW_ID, success=True) == len(TWOS)
    world.quiesce()
    assert prepare_load(world, B, TWOS).lookup is Lookup.HIT


def test_stores_that_a_returning_engine_does_not_name_are_released():
    """It has forgotten them: no process writes there any more."""
    world, _, storing = world_with_leases()
    engine = world.engine
    engine.engines.detach(ENGINE_ID)
    world.pump()
    found = events_of(world, lambda: engine.engines.reattach(ENGINE_ID, NEW_ID, ()))
    assert found[OWNER_REATTACHED] == {"owner": str(NEW_ID), "num_confirmed": "0", "num_lost": "0"}
    assert storing.lease_id not in leases(world)
    assert engine.inspection.stats().num_quarantined_slots == 0


def test_equal_queues_have_equal_digests():
    """However they came about, as a whole or by changes."""
    world, engines = new_world(), new_world().engine.engines
    first = world.engine.engines.replace_queue(ENGINE_ID, queue_of(A, B, C))
    other = engines.replace_queue(ENGINE_ID, queue_of(A))
    assert first != other
    assert engines.num_requests(ENGINE_ID) == (1, 0)
    _, *more = queue_of(A, B, C).waiting
    assert engines.change_queue(ENGINE_ID, queue_change(more)) == first
    assert engines.num_requests(ENGINE_ID) == (3, 0)
