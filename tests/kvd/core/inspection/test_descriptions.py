"""What operators see of sessions and tiers."""

from kvd.core.records.tier import Tier
from kvd.core.state.outbox import COUNTERS
from tests.kvd.core.turns import (
    ONES,
    TWOS,
    A,
    B,
    C,
    complete_store,
    new_world,
    prepare_store,
    queue_of,
    store,
    tiers_of,
)
from tests.property.cache_world import to_bytes


def test_a_session_is_described_block_by_block():
    """Spans with their places, and how many sessions use each block."""
    world = new_world()
    store(world, A, [*ONES, 2])
    store(world, B, ONES, settle=False)
    detail = world.engine.inspection.describe(A)
    assert [(b.token_offset, b.num_tokens, b.num_sessions, b.dirty) for b in detail.blocks] == [
        (0, 4, 2, False),
        (4, 1, 1, False),
    ]
    assert detail.blocks[0].tiers == (Tier.DRAM, Tier.SSD)
    assert detail.info == world.engine.inspection.info(A)


def test_stats_count_bytes_and_leases():
    """Slots being written are used, blocks are not; every counter exists from the start."""
    world = new_world(num_slots=4, num_extents=8)
    prepare_store(world, A, ONES + TWOS)
    stats = world.engine.inspection.stats()
    block_bytes = world.engine.layout.block_bytes
    dram, ssd = stats.tiers
    assert (dram.capacity_bytes, dram.used_bytes, dram.num_blocks) == (
        4 * block_bytes,
        2 * block_bytes,
        0,
    )
    assert (ssd.capacity_bytes, ssd.used_bytes) == (8 * block_bytes, 0)
    assert (stats.num_leases, stats.num_sessions, stats.dirty_bytes) == (1, 0, 0)
    assert set(stats.counters) == set(COUNTERS)


def test_ssd_usage_counts_whole_extents():
    """It is what no other block can have; a packed block takes its part of an extent."""
    world = new_world(num_slots=4, num_extents=8)
    store(world, A, ONES + TWOS)
    _, ssd = world.engine.inspection.stats().tiers
    assert (ssd.used_bytes, ssd.num_blocks) == (2 * world.engine.layout.block_bytes, 2)


def test_queues_and_windows_are_counted():
    """Waiting requests, and how many sessions of mean size fit into DRAM and into both tiers."""
    world = new_world(num_slots=8, num_extents=8)
    assert world.engine.inspection.queue_stats().prefetch_window == 0
    store(world, A, ONES + TWOS)
    world.engine.engines.replace_queue(1, queue_of(A, B, C))
    stats = world.engine.inspection.queue_stats()
    assert (stats.waiting_jobs, stats.running_sessions) == (3, 0)
    assert stats.mean_session_bytes == 2 * world.engine.layout.block_bytes
    assert (stats.prefetch_window, stats.eviction_window) == (4, 8)


def test_a_sessions_waste_is_in_its_own_blocks():
    """Shared blocks count no waste; being packed makes no difference."""
    world = new_world(num_slots=4)
    row_bytes = world.engine.layout.block_bytes // 4
    store(world, A, [*ONES, *TWOS, 3])
    assert world.engine.inspection.info(A).waste_bytes == 3 * row_bytes
    store(world, B, [7] * 16)
    assert tiers_of(world, A) == ["S", "S", "S"]
    assert world.engine.inspection.info(A).waste_bytes == 3 * row_bytes
    store(world, C, [*ONES, *TWOS, 3])
    assert world.engine.inspection.info(A).waste_bytes == 0


def test_a_description_says_whether_a_block_is_hashed():
    """Blocks on SSD are hashed, though their checksums are not in memory."""
    world = new_world(num_slots=6)
    complete_store(world, prepare_store(world, A, ONES))
    assert [b.is_hashed for b in world.engine.inspection.describe(A).blocks] == [False]
    world.quiesce()
    assert [b.is_hashed for b in world.engine.inspection.describe(A).blocks] == [True]
    world.engine.sessions.discard(A, to_bytes(ONES), [(1, 2)])
    store(world, B, [7] * 24)
    assert world.engine._state.sessions[A].spans, "it is not packed"
    assert [(b.tiers, b.is_hashed) for b in world.engine.inspection.describe(A).blocks] == [
        ((Tier.SSD,), True)
    ] * 2


def test_windows_do_not_count_the_room_that_is_kept_free():
    """Reading ahead may not use it, and stores may."""
    world = new_world(num_slots=8, num_extents=8, watermark=0.25)
    store(world, A, ONES + TWOS)
    world.engine.engines.replace_queue(1, queue_of(A, B, C))
    stats = world.engine.inspection.queue_stats()
    assert (stats.prefetch_window, stats.eviction_window) == (3, 8)
