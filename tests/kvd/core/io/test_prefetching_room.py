"""Reading ahead, and its room: which sessions give way, what stays free, and what stays."""

import pytest

from kvd.core.eviction.policies import POLICIES
from kvd.core.io.prefetching import MOST_TIMES, YIELD_NS
from kvd.core.io.reading import RETRY_NS
from kvd.core.records.actions import ReadBlock, WriteBlock
from kvd.core.records.tier import Admission
from shared.types.queue_delta import RunningRequest
from tests.kvd.core.io.reading_worlds import (
    BLOCK_BYTES,
    ONE,
    being_read,
    finish_reads,
    queue,
    reading_world,
    run,
    store_on_ssd,
    tokens_of,
)
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    counter,
    load,
    prepare_load,
    prepare_store,
    queue_of,
    store,
    tiers_of,
    wait,
)
from tests.queue_changes import queue_change


def test_a_session_that_is_needed_sooner_does_not_give_way():
    """It keeps its room from a turn behind it; a turn before it may take it."""
    world = reading_world(num_slots=2)
    store(world, C, THREES)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert [tiers_of(world, key) for key in (A, B, C)] == [["DS"], ["DS"], ["S"]]
    queue(world, A, B, C)
    assert not world.io
    queue(world, C, A, B)
    assert finish_reads(world) == [C]
    assert [tiers_of(world, key) for key in (A, B, C)] == [["DS"], ["S"], ["DS"]]
    assert not world.io, "B waits until there is room"


def test_after_a_start_reading_waits_for_no_store():
    """Waiting stores had their turn; no store has asked this kvd yet."""
    world = reading_world(num_slots=2)
    store_on_ssd(world, {A: 1})
    world.start()
    queue(world, A)
    assert being_read(world) == [A]


def test_idle_sessions_give_way():
    """The coldest go first, and only as much as is needed."""
    world = reading_world(num_slots=4)
    store_on_ssd(world, {C: 1})
    store(world, A, tokens_of(A, 2))
    store(world, B, tokens_of(B, 2))
    queue(world, C)
    assert finish_reads(world) == [C]
    assert [tiers_of(world, key) for key in (A, B)] == [["DS", "S"], ["DS", "DS"]]


def test_dirty_blocks_do_not_give_way():
    """Reading ahead loses and writes nothing."""
    world = reading_world(num_slots=2, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert prepare_store(world, C, THREES).refused == "wait"  # has A written
    world.quiesce()
    store(world, C, THREES)
    assert [tiers_of(world, key) for key in (A, B, C)] == [["S"], ["D"], ["D"]]
    queue(world, A)
    assert not world.io
    world.engine.write_dirty()
    assert [tiers_of(world, key) for key in (B, C)] == [["D"], ["D"]]


def test_a_waiting_store_goes_first():
    """Slots that become free are kept for it until it has had time to ask again."""
    world = reading_world(num_slots=2, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert prepare_store(world, C, THREES).refused == "wait"  # has A written
    world.quiesce()
    queue(world, C)
    store(world, C, THREES)
    world.now_ns += YIELD_NS
    queue(world, A, B, C)
    assert prepare_store(world, C, tokens_of(C, 2)).refused == "wait"  # has B written
    world.finish_all(WriteBlock)
    assert not world.io_of(ReadBlock), "there is room for A, but that is wanted"
    assert world.engine.next_deadline_ns() == world.now_ns + YIELD_NS
    assert prepare_store(world, C, tokens_of(C, 2)).blocks
    assert tiers_of(world, B) == ["S"]


def test_a_waiting_store_schedules_nothing_without_reading_ahead():
    """There is no reading to resume after it."""
    world = reading_world(num_slots=1, prefetch_bytes=0, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    assert prepare_store(world, B, TWOS).refused == "wait"
    assert world.engine.next_deadline_ns() is None


def test_nothing_is_read_ahead_during_a_shutdown():
    """Not even for a queue that is reported then."""
    world = reading_world()
    store_on_ssd(world, {A: 2})
    world.engine.write_dirty()
    queue(world, A)
    assert not world.io


def test_a_shared_block_stays_for_a_waiting_session():
    """The only session that had it in DRAM is the first to give way."""
    world = reading_world(num_slots=3)
    store(world, A, ONES + TWOS)
    store(world, B, ONES)
    assert world.engine.release_dram()
    world.pump()
    store(world, C, tokens_of(C, 2))
    world.engine.release_dram()
    world.pump()
    for key, tokens in ((B, ONES), (C, tokens_of(C, 2))):
        world.now_ns += 1
        load(world, key, tokens)
    queue(world, A)
    finish_reads(world)
    assert tiers_of(world, A) == ["DS", "DS"]


def test_the_watermark_is_kept_by_evicting_clean_blocks():
    """A store finds free slots, and they are freed again after it."""
    world = reading_world(num_slots=10, watermark=0.2)
    for index in range(12):
        key = A._replace(session_id=f"s{index}")
        answer = prepare_store(world, key, [index] * 4)
        assert answer.blocks, "a store may use the watermark"
        world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
        world.pump()
        world.quiesce()
        assert (
            world.engine.inspection.stats().tiers[0].used_bytes
            <= 8 * world.engine.layout.block_bytes
        )
    assert counter(world, "evictions_dram") == 4


def test_loads_may_use_the_watermark_and_reading_ahead_may_not():
    """Reading ahead frees its own room, or reads nothing."""
    world = reading_world(num_slots=10, watermark=0.2)
    store_on_ssd(world, {A: 12})
    queue(world, A)
    finish_reads(world)
    assert tiers_of(world, A).count("DS") == 8
    answer = prepare_load(world, A, tokens_of(A, 12))
    assert len(answer.spans) == 10


def test_the_watermark_has_dirty_idle_blocks_written():
    """Blocks that are otherwise written only when their room is wanted are wanted then."""
    world = reading_world(num_slots=10, watermark=0.2, admission=Admission.ON_EVICT)
    store(world, A, tokens_of(A, 8))
    assert not world.io_of(WriteBlock)
    store(world, B, TWOS, settle=False)
    assert len(world.io_of(WriteBlock)) == 1
    world.quiesce()
    assert tiers_of(world, A) == ["D"] * 7 + ["S"]
    assert counter(world, "sessions_dropped") == 0


@pytest.mark.parametrize(("num_slots", "num_read", "num_wasted"), [(32, 29, 0), (8, 7, 2)])
def test_slots_are_reserved_for_the_stores_of_running_turns(num_slots, num_read, num_wasted):
    """About as many as they ask for, so that they do not evict blocks that were read ahead."""
    world = reading_world(num_slots=num_slots)
    store_on_ssd(world, {B: 40})
    for _ in range(40):  # a running mean
        store(world, A, tokens_of(A, 3))
        world.engine.sessions.flush(A, dry_run=False)
        world.pump()
    world.quiesce()
    waiting = queue_of(B).waiting
    change = queue_change(waiting, [RunningRequest(99, A)])
    world.engine.engines.replace_queue(ENGINE_ID, change)
    world.pump()
    finish_reads(world)
    assert tiers_of(world, B).count("DS") == num_read
    assert prepare_store(world, A, tokens_of(A, 3)).blocks
    assert counter(world, "prefetch_wasted") == num_wasted


def test_reading_and_evicting_do_not_alternate_for_ever():
    """Stores may evict the blocks of a turn that does not come as often as they like."""
    world = reading_world(num_slots=4)
    store_on_ssd(world, {A: 3})
    for index in range(20):
        queue(world, A)
        world.quiesce()
        # an earlier turn needs all of DRAM, and has ended
        other = B._replace(session_id=f"s{index}")
        queue(world, other, A)
        store(world, other, [100 + index] * 16)
        world.engine.sessions.flush(other, dry_run=False)
        world.pump()
    assert counter(world, "prefetch_blocks") == MOST_TIMES * 3
    assert counter(world, "prefetch_wasted") == MOST_TIMES * 3
    load(world, A, tokens_of(A, 3))
    store(world, C, [7] * 16)
    queue(world, A)
    world.quiesce()
    assert counter(world, "prefetch_blocks") > MOST_TIMES * 3, "it was used meanwhile"


def test_no_more_is_planned_than_may_be_read_between_two_uses():
    """Of three that were read of two blocks' four, two more would be one too many."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 2})
    queue(world, A)
    queue(world)
    finish_reads(world)
    for num_read in (2, 0):
        assert world.engine.release_dram()
        world.pump()
        queue(world, A)
        assert len(finish_reads(world)) == num_read
        queue(world)


def test_a_queue_that_does_not_fit_stops_being_read():
    """Sessions are read until DRAM is full of those needed soonest, and then no more."""
    world = reading_world(num_slots=5, num_extents=100)
    keys = [A._replace(session_id=f"s{index}") for index in range(12)]
    for index, key in enumerate(keys):
        store(world, key, [index] * 8)
    queue(world, *keys)
    world.quiesce()
    num_blocks = counter(world, "prefetch_blocks")
    for _ in range(5):
        world.pump()
        wait(world, RETRY_NS)
        world.quiesce()
    assert counter(world, "prefetch_blocks") == num_blocks <= 5
    assert [tiers_of(world, key) for key in keys[:2]] == [["DS", "DS"]] * 2


def test_a_running_session_gives_way_when_its_engine_has_its_kv():
    """Not before, and only blocks that SSD has."""
    world = reading_world(num_slots=3)
    store(world, B, TWOS)
    store(world, A, ONES)
    store(world, C, THREES)
    run(world, A)
    store(world, C, tokens_of(C, 2))
    assert [tiers_of(world, key) for key in (A, B)] == [["DS"], ["S"]], "A is not loaded yet"
    store(world, B, TWOS)
    load(world, B, TWOS)
    assert load(world, A, ONES).end_token == 4
    store(world, C, tokens_of(C, 3))
    assert tiers_of(world, A) == ["S"], "coldest in DRAM, though just used"


def test_the_last_copy_of_a_running_session_is_cut_last():
    """Its engine will store new blocks, which need those before them."""
    world = reading_world(num_slots=3, num_extents=0)
    store(world, A, ONES)
    store(world, B, TWOS)
    store(world, C, THREES)
    load(world, A, ONES)
    run(world, A)
    store(world, C, tokens_of(C, 2))
    assert world.engine.inspection.info(B) is None
    assert tiers_of(world, A) == ["D"]
    store(world, C, tokens_of(C, 3))
    assert world.engine.inspection.info(A) is None, "nothing else was left"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_clean_blocks_are_never_written(policy):
    """CacheWorld asserts it of every write: through evictions, reads ahead and new turns."""
    world = reading_world(num_slots=6, policy=policy, watermark=0.2)
    for turn in range(1, 4):
        for key in (A, B, C):
            queue(world, *[other for other in (A, B, C) if other != key])
            load(world, key, tokens_of(key, turn - 1))
            store(world, key, tokens_of(key, turn))
    assert counter(world, "ssd_written_bytes") == 9 * BLOCK_BYTES
    assert counter(world, "ssd_read_bytes") % BLOCK_BYTES == 0


def test_the_smallest_budget_and_arena_suffice():
    """One read at a time, into the only slot there is."""
    world = reading_world(num_slots=1, prefetch_bytes=1)
    store_on_ssd(world, {A: 1})
    queue(world, A)
    assert being_read(world) == [A]
