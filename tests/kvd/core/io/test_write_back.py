"""Write back: what blocks wait for before they are written, and what SSD has no room for."""

from dataclasses import replace

import pytest

from kvd.core.eviction.policies import LruPolicy
from kvd.core.records.actions import HashSlots, IoOutcome, WriteBlock
from kvd.core.records.entries import Pin
from kvd.core.records.tier import Admission
from kvd.core.state.limits import Limits
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
    store,
    tiers_of,
    wait,
)
from tests.property.cache_world import CacheWorld

DELAY_NS = 100


def write_back_world(num_slots=16, **limits):
    return new_world(
        num_slots, admission=Admission.WRITE_BACK, write_back_delay_ns=DELAY_NS, **limits
    )


def test_write_back_waits_until_a_session_is_idle():
    """Each use postpones it; then all of its dirty blocks are written."""
    world = write_back_world()
    store(world, A, ONES + TWOS)
    assert world.engine.next_deadline_ns() == world.now_ns + DELAY_NS
    wait(world, DELAY_NS - 1)
    load(world, A, ONES)
    wait(world, DELAY_NS - 1)
    assert tiers_of(world, A) == ["D", "D"]
    assert world.engine.next_deadline_ns() == world.now_ns + 1
    wait(world, 1)
    world.quiesce()
    assert tiers_of(world, A) == ["DS", "DS"]
    assert world.engine.next_deadline_ns() is None


def test_a_tail_that_is_replaced_in_time_is_never_written():
    """A growing session costs SSD only its final blocks."""
    world = write_back_world()
    store(world, A, [*ONES, 2])
    store(world, A, ONES + TWOS)
    wait(world, DELAY_NS)
    assert sorted(world.io[op_id].num_tokens for op_id in world.io_of(WriteBlock)) == [4, 4]


def test_a_session_flushed_before_its_write_back_does_no_harm():
    """Its deadline passes, and there is nothing to write."""
    world = write_back_world()
    store(world, A, ONES)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    wait(world, DELAY_NS)
    assert world.engine.next_deadline_ns() is None


def test_too_many_dirty_bytes_are_written_at_once():
    """The sessions idle for longest go first, as far as needed."""
    world = write_back_world(num_slots=4)
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        world.now_ns += 1
        store(world, key, tokens, settle=False)
    load(world, A, ONES)
    world.quiesce()
    assert [tiers_of(world, key) for key in (A, B, C)] == [["DS"], ["D"], ["D"]]
    world.now_ns += 1
    load(world, B, TWOS)
    store(world, B, TWOS + ONES)
    assert [tiers_of(world, key) for key in (B, C)] == [["D", "D"], ["DS"]]


def test_dirty_blocks_are_written_when_their_room_is_wanted():
    """on_evict: no block is written until a store wants slots; then the coldest are."""
    world = new_world(num_slots=2, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert tiers_of(world, A) == ["D"]
    assert prepare_store(world, C, THREES).refused == "wait"
    assert prepare_store(world, C, THREES).refused == "wait"
    assert (len(world.io_of(WriteBlock)), counter(world, "demotions")) == (1, 1)
    world.quiesce()
    assert len(prepare_store(world, C, THREES).blocks) == 1
    assert [tiers_of(world, key) for key in (A, B)] == [["S"], ["D"]]


def test_a_load_makes_room_as_a_store_does():
    """It is busy until a dirty block has been written to make room."""
    world = new_world(num_slots=1, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    assert prepare_store(world, B, TWOS).refused == "wait"
    world.quiesce()
    store(world, B, TWOS)
    assert prepare_load(world, A, ONES).miss_reason == "busy"
    world.quiesce()
    assert load(world, A, ONES).end_token == 4


def test_blocks_that_ssd_cannot_take_are_cut():
    """A block without an extent is no reason to wait."""
    world = new_world(num_slots=2, num_extents=1, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS)
    assert len(prepare_store(world, C, THREES).blocks) == 1
    assert counter(world, "ssd_refused") == 2, "when it was hashed, and for its room"
    assert world.engine.inspection.info(B) is None


def test_all_dirty_blocks_can_be_written():
    """Under any policy: before a shutdown."""
    world = new_world(admission=Admission.ON_EVICT)
    store(world, A, ONES + TWOS)
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().dirty_bytes == 0


@pytest.mark.parametrize("admission", [Admission.ON_EVICT, Admission.WRITE_BACK])
def test_blocks_being_hashed_at_shutdown_are_written_too(admission):
    """A shutdown asks once; a block that cannot be written yet is written when it can be."""
    world = new_world(admission=admission)
    complete_store(world, prepare_store(world, A, ONES))
    assert any(isinstance(action, HashSlots) for action in world.io.values())
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().dirty_bytes == 0


def test_less_room_on_ssd_evicts_the_coldest():
    """A full file system causes evictions, and the writes continue."""
    world = new_world(num_extents=3)
    store(world, A, ONES + TWOS)
    store(world, B, THREES, settle=False)
    world.finish_all(WriteBlock, IoOutcome.FULL)
    assert world.engine.inspection.stats().tiers[1].degraded_reason == "full"
    world.engine.writes.set_capacity(2)
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().tiers[1].degraded_reason == ""
    assert tiers_of(world, A) == ["DS", "D"]
    assert tiers_of(world, B) == ["DS"]
    world.engine.writes.set_capacity(3)
    store(world, A, ONES + TWOS)
    assert tiers_of(world, A) == ["DS", "DS"]


def test_refused_blocks_are_written_when_there_is_room_again():
    """Even if their session is not used: free extents are for them."""
    world = new_world(num_extents=1)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS + THREES)
    assert tiers_of(world, B) == ["D", "D"]
    assert counter(world, "ssd_refused") == 2
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, B) == ["DS", "D"], "the one refused first"
    world.engine.writes.set_capacity(2)
    world.pump()
    world.quiesce()
    assert tiers_of(world, B) == ["DS", "DS"]


def test_a_block_that_lost_its_extent_gets_one_again():
    """It is dirty again, and written when the warmer session has gone."""
    world = new_world(num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["D"], ["DS"])
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, A) == ["DS"]


def test_refused_blocks_do_not_take_extents_from_waiting_ones():
    """They are forgotten with their session."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS)
    store(world, C, THREES)
    world.engine.sessions.flush(B, dry_run=False)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, C) == ["DS"]
    assert not world.engine._state.unwritten.refused


def looking_world(**limits):
    """Make a world that counts its searches for sessions that could give way."""
    looks = []

    class Looking(LruPolicy):
        def victims(self, tier, now_ns, **asked):
            if tier is not None:
                looks.append(tier)
            return super().victims(tier, now_ns, **asked)

    return CacheWorld(Limits(4, 64, **limits), Looking), looks


def test_a_shortage_below_the_watermark_is_searched_once():
    """Until something has changed: all blocks may be in use."""
    world, looks = looking_world(watermark=0.5)
    store(world, A, ONES + TWOS + THREES, settle=False)
    lease = prepare_load(world, A, ONES + TWOS + THREES)
    world.quiesce()
    looks.clear()
    for _ in range(5):
        world.pump()
    assert not looks, "all of it is leased"
    world.engine.set_limits(replace(world.limits, watermark=0.75))
    for _ in range(5):
        world.pump()
    assert len(looks) == 1, "the watermark is another one"
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    world.pump()
    assert world.engine._state.slots.num_free == 3


def test_the_watermark_writes_no_more_than_is_short():
    """As many idle blocks are written as slots are missing."""
    world = new_world(4, admission=Admission.ON_EVICT, watermark=0.25)
    for key in (A, B, C):
        store(world, key, [key.session_id.encode()[0]] * 4)
    assert not world.io_of(WriteBlock)
    store(world, OTHER_TENANT, ONES, settle=False)
    assert counter(world, "demotions") == 1
    world.quiesce()
    assert (counter(world, "demotions"), world.engine._state.slots.num_free) == (1, 1)
