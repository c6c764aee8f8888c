"""Reads that loads wait for succeed, or fail."""

import pytest

from kvd.core.records.actions import Emit, IoOutcome
from kvd.core.records.records import LeaseState
from shared.types.granted_slots import Lookup
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    TWOS,
    A,
    B,
    counter,
    keys_of,
    load,
    prepare_load,
    tiers_of,
    world_with_a_on_ssd,
)


def test_a_corrupt_block_cuts_the_answer_and_the_session():
    """The prefix before it is served; the block and those behind it are dropped; it is counted."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES + TWOS)
    first, second = sorted(world.io)
    world.finish_io(first, IoOutcome.OK)
    world.finish_io(second, IoOutcome.CORRUPT)
    settled = world.engine.loads.settle(answer.lease_id)
    assert (settled.lookup, settled.end_token, settled.more) == (Lookup.HIT, 4, False)
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    assert load(world, A, ONES + TWOS, from_token=4).miss_reason == "corrupt"
    assert counter(world, "blocks_corrupt") == 1


@pytest.mark.parametrize(
    ("outcome", "name", "said"),
    [
        (IoOutcome.TRANSIENT, "read_failed", {}),
        (IoOutcome.CORRUPT, "block_corrupt", {"tier": "ssd", "num_sessions": "1"}),
    ],
)
def test_a_failed_read_is_reported(outcome, name, said):
    """With the block, and with the session that used it last."""
    world = world_with_a_on_ssd()
    (block, _) = keys_of(world, A)
    prepare_load(world, A, ONES)
    world.finish_io(min(world.io), outcome)
    events = [event for event in world.events if isinstance(event, Emit) and event.name == name]
    assert [(event.key, event.fields) for event in events] == [(A, {"block": block.hex()} | said)]


def test_a_load_that_is_corrupt_from_the_start_is_a_miss():
    """Nothing remains: MISS, no lease, and reads behind it serve no load."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES + TWOS)
    world.finish_io(min(world.io), IoOutcome.CORRUPT)
    settled = world.engine.loads.settle(answer.lease_id)
    assert (settled.lookup, settled.miss_reason) == (Lookup.MISS, "corrupt")
    assert world.engine.loads.state_of(answer.lease_id) is LeaseState.LOST
    assert world.engine.inspection.info(A) is None
    world.quiesce()


def test_a_transient_error_keeps_the_block_on_ssd():
    """The answer is cut, and the next load may succeed."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES)
    world.finish_io(min(world.io), IoOutcome.TRANSIENT)
    assert world.engine.loads.settle(answer.lease_id).miss_reason == "read_error"
    assert tiers_of(world, A) == ["S", "S"]
    assert load(world, A, ONES).end_token == 4


def test_an_abandoned_read_of_a_flushed_session_leaves_nothing():
    """The block is dropped when its read ends."""
    world = world_with_a_on_ssd()
    answer = prepare_load(world, A, ONES)
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert tiers_of(world, B) == ["DS", "S"]
    assert [tier.num_blocks for tier in world.engine.inspection.stats().tiers] == [1, 2]


def test_a_block_that_was_read_may_be_written_again():
    """Its token ids come from the extent's header, so a block that left SSD can be stored again."""
    world = world_with_a_on_ssd()
    load(world, A, ONES + TWOS)
    world.engine.writes.set_capacity(0)
    world.pump()
    world.quiesce()
    assert tiers_of(world, A) == ["D", "D"]
    world.engine.writes.set_capacity(4)
    world.engine.write_dirty()
    world.pump()
    world.quiesce()
    assert tiers_of(world, A) == ["DS", "DS"]
