"""Write-through and its failures."""

from kvd.core.actions import DropBlock, Emit, IoOutcome, PutBlock, WriteBlock
from kvd.core.writing import FIRST_RETRY_NS
from tests.kvd.core.turns import ONES, THREES, TWOS, A, B, counter, new_world, store, tiers_of


def test_a_row_is_put_after_its_data_is_durable():
    """PutBlock comes with the outcome of the write, with tokens and checksums."""
    world = new_world()
    store(world, A, ONES, settle=False)
    assert not any(isinstance(action, PutBlock) for action in world.index.uncommitted)
    assert world.engine.stats().dirty_bytes == world.engine.layout.block_bytes
    world.finish_io(next(iter(world.io)), IoOutcome.OK)
    rows = [action.block for action in world.index.uncommitted if isinstance(action, PutBlock)]
    assert [(row.num_tokens, len(row.token_ids), len(row.checksums)) for row in rows] == [
        (4, 16, 1)
    ]
    assert world.engine.stats().dirty_bytes == 0


def test_a_failed_write_degrades_the_tier_and_is_tried_again():
    """Writes are held back with a growing delay; the first success ends it."""
    world = new_world()
    store(world, A, ONES, settle=False)
    for delay_ns in (FIRST_RETRY_NS, 2 * FIRST_RETRY_NS):
        for op_id in sorted(world.io):
            world.finish_io(op_id, IoOutcome.FULL)
        assert world.engine.stats().tiers[1].degraded_reason == "full"
        assert world.engine.next_deadline_ns() == world.now_ns + delay_ns
        store(world, B, TWOS, settle=False)
        assert not world.io, "writes are held back"
        world.now_ns += delay_ns
        world.engine.expire(world.now_ns)
        world.pump()
    world.finish_io(min(world.io), IoOutcome.OK)
    assert world.engine.stats().tiers[1].degraded_reason == ""
    names = [event.name for event in world.events if isinstance(event, Emit)]
    assert names.count("ssd_degraded") == names.count("ssd_recovered") == 1
    assert world.engine.next_deadline_ns() is None


def test_failures_of_one_volley_count_once():
    """Several writes failing together do not multiply the delay."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES, settle=False)
    for op_id in sorted(world.io):
        world.finish_io(op_id, IoOutcome.TRANSIENT)
    assert world.engine.next_deadline_ns() == world.now_ns + FIRST_RETRY_NS
    assert counter(world, "write_errors") == 3


def test_a_degraded_tier_does_not_block_stores():
    """With writes held back, dirty blocks of the coldest session make room."""
    world = new_world(num_slots=1)
    store(world, A, ONES, settle=False)
    world.finish_io(next(iter(world.io)), IoOutcome.FULL)
    answer = store(world, B, TWOS, settle=False)
    assert len(answer.blocks) == 1
    assert world.engine.session_info(A) is None


def test_a_write_waits_for_the_extent_of_a_dropped_row():
    """An extent is reused only once the removal of its row is committed."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS, settle=False)
    assert not world.io
    drops = [action for action in world.index.uncommitted if isinstance(action, DropBlock)]
    assert len(drops) == 1
    world.commit(len(world.index.uncommitted))
    assert [type(action) for action in world.io.values()] == [WriteBlock]
    assert tiers_of(world, A) == ["D"]


def test_a_block_dropped_while_it_is_written_gives_both_places_back():
    """A flush does not wait for writes; their outcome finds nobody."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.engine.flush(A, False, world.now_ns)
    world.pump()
    world.finish_io(next(iter(world.io)), IoOutcome.OK)
    assert [tier.used_bytes for tier in world.engine.stats().tiers] == [0, 0]


def test_a_dropped_block_whose_write_fails_leaves_nothing():
    """A failed write of an unwanted block is not tried again."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.engine.flush(A, False, world.now_ns)
    world.pump()
    world.finish_io(next(iter(world.io)), IoOutcome.TRANSIENT)
    assert [tier.used_bytes for tier in world.engine.stats().tiers] == [0, 0]
    assert world.engine.next_deadline_ns() is None
