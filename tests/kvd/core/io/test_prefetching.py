"""Reading ahead: in which order, into which room, and what ends it."""

import pytest

from kvd.core.eviction.policies import POLICIES
from kvd.core.io.prefetching import LOOK_NS, MOST_TIMES, YIELD_NS
from kvd.core.io.reading import RETRY_NS
from kvd.core.records.actions import Emit, IoOutcome, ReadBlock, WriteBlock
from kvd.core.records.records import Admission
from kvd.core.state.limits import Limits
from shared.types.granted_slots import Lookup
from shared.types.queue_delta import QueueChange, QueuedRequest, RunningRequest
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
    new_world,
    prepare_load,
    prepare_store,
    queue_of,
    store,
    tiers_of,
)
from tests.property.cache_world import SHAPE, CacheWorld
from tests.property.expecting_policy import ExpectingPolicy

BLOCK_BYTES = SHAPE.full_bytes  # of a read
ONE, MANY = BLOCK_BYTES, 64 * BLOCK_BYTES  # in flight
OTHER_ENGINE_ID = 2
TOKENS = {A: ONES, B: TWOS, C: THREES}


def reading_world(num_slots=16, prefetch_bytes=MANY, policy="lookahead_queue", **limits):
    return new_world(num_slots, policy=policy, prefetch_bytes=prefetch_bytes, **limits)


def expecting_world(num_slots=16, **limits):
    return CacheWorld(Limits(num_slots, 64, prefetch_bytes=MANY, **limits), ExpectingPolicy)


def store_on_ssd(world, sizes):
    """Store sessions of so many blocks, and empty DRAM."""
    for key, num_blocks in sizes.items():
        store(world, key, tokens_of(key, num_blocks))
    assert world.engine.release_dram()
    world.pump()


def tokens_of(key, num_blocks):
    """Blocks that no other session has."""
    return TOKENS[key] * num_blocks


def queue(world, *keys, engine_id=ENGINE_ID):
    world.engine.engines.replace_queue(engine_id, queue_of(*keys))
    world.pump()


def run(world, key, number=99):
    """Have a turn of the session run, and no other."""
    change = QueueChange(running=[RunningRequest(number, key)])
    world.engine.engines.replace_queue(ENGINE_ID, change)
    world.pump()


def being_read(world):
    """Whose blocks are being read, in the order in which that was asked for."""
    infos = {
        key: world.engine.inspection.info(key) and world.engine.inspection.describe(key)
        for key in TOKENS
    }
    key_of_block = {b.key: key for key, info in infos.items() if info for b in info.blocks}
    return [key_of_block[world.io[op_id].key] for op_id in world.io_of(ReadBlock)]


def finish_reads(world):
    """End reads one by one, with what they bring about; returns whose they were."""
    done = []
    while world.io_of(ReadBlock):
        done.append(being_read(world)[0])
        world.finish_io(world.io_of(ReadBlock)[0])
    return done


def wait(world, elapsed_ns):
    world.now_ns += elapsed_ns
    world.engine.expire()
    world.pump()


# --------------------------------------------------------------------------------------- the queue


def test_waiting_sessions_are_read_in_the_order_of_the_queue():
    """One block after the other, each session whole; then a load finds it in DRAM."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 2, B: 1, C: 2})
    assert not world.io
    queue(world, C, A, B)
    assert being_read(world) == [C]
    assert finish_reads(world) == [C, C, A, A, B]
    assert counter(world, "prefetch_blocks") == 5
    assert counter(world, "prefetch_tokens") == 20
    answer = prepare_load(world, A, tokens_of(A, 2))
    assert answer.lookup is Lookup.HIT
    assert {span.tier for span in answer.spans} == {"dram"}
    assert counter(world, "prefetch_hits") == 2
    events = [e for e in world.events if isinstance(e, Emit) and e.name == "session_read_ahead"]
    assert [event.key for event in events] == [C, A, B]
    assert [event.fields for event in events] == [
        {"num_blocks": str(number), "why": "queued"} for number in (2, 2, 1)
    ]


def test_what_is_under_way_is_bounded():
    """By bytes; the next read begins when one ends."""
    world = reading_world(prefetch_bytes=2 * BLOCK_BYTES)
    store_on_ssd(world, {A: 4})
    queue(world, A)
    assert len(world.io_of(ReadBlock)) == 2
    world.finish_io(world.io_of(ReadBlock)[0])
    assert len(world.io_of(ReadBlock)) == 2
    assert all(world.io[op_id].ahead for op_id in world.io_of(ReadBlock))


def test_only_the_window_is_read():
    """L_pw = C_mem / S_kv requests, though there were room for more."""
    world = reading_world(num_slots=6)
    store_on_ssd(world, {C: 4, A: 1, B: 1})
    queue(world, A, B, C)
    assert finish_reads(world) == [A, B, C, C, C, C], "a mean of 2 blocks: 3 jobs"
    world = reading_world(num_slots=5)
    store_on_ssd(world, {C: 4, A: 1, B: 1})
    queue(world, A, B, C)
    assert finish_reads(world) == [A, B]


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_policies_that_do_not_look_ahead_read_nothing(policy):
    """They are what looking ahead is measured against."""
    world = reading_world(policy=policy)
    store_on_ssd(world, {A: 2})
    queue(world, A)
    assert not world.io


def test_without_a_budget_nothing_is_read():
    """prefetch_bytes = 0."""
    world = reading_world(prefetch_bytes=0)
    store_on_ssd(world, {A: 2})
    queue(world, A)
    assert not world.io


def test_a_change_of_the_queue_counts_with_the_next_block():
    """What was begun ends; what is needed sooner now comes before the rest."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3, B: 2})
    queue(world, A, B)
    assert being_read(world) == [A]
    queue(world, B, A)
    assert finish_reads(world) == [A, B, B, A, A]
    assert counter(world, "prefetch_cancelled") == 0


def test_nothing_more_is_read_for_a_turn_that_left():
    """What has come stays; the rest of the session is packed again."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 4})
    queue(world, A)
    queue(world)
    assert finish_reads(world) == [A]
    assert counter(world, "prefetch_cancelled") == 1
    assert tiers_of(world, A) == ["DS", "S", "S", "S"]
    assert world.engine._state.sessions[A].num_packed == 3


@pytest.mark.parametrize("how", ["gone", "detach"])
def test_a_lost_engine_stops_it(how):
    """Its queue goes with its connection; another engine's stays."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3, B: 2})
    queue(world, A)
    queue(world, B, engine_id=OTHER_ENGINE_ID)
    getattr(world.engine.engines, how)(ENGINE_ID)
    world.pump()
    assert finish_reads(world) == [A, B, B]


def test_a_turn_that_starts_is_not_cancelled():
    """Its load asks for the rest."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3})
    queue(world, A)
    run(world, A)
    assert counter(world, "prefetch_cancelled") == 0
    assert finish_reads(world) == [A]
    assert load(world, A, tokens_of(A, 3)).end_token == 12


def test_sessions_in_dram_need_nothing():
    """Nor does one that is not stored at all."""
    world = reading_world()
    store(world, A, ONES)
    queue(world, A, B)
    assert not world.io
    store(world, B, TWOS)
    assert not world.io


# ---------------------------------------------------------------------------------------- the room


def test_what_is_needed_sooner_does_not_give_way():
    """To a turn behind it; one that goes before it may have its room."""
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


def test_idle_sessions_give_way():
    """The coldest first, and only as much as is needed."""
    world = reading_world(num_slots=4)
    store_on_ssd(world, {C: 1})
    store(world, A, tokens_of(A, 2))
    store(world, B, tokens_of(B, 2))
    queue(world, C)
    assert finish_reads(world) == [C]
    assert [tiers_of(world, key) for key in (A, B)] == [["DS", "S"], ["DS", "DS"]]


def test_dirty_blocks_do_not_give_way():
    """Reading ahead loses nothing and writes nothing."""
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


def test_a_store_that_waits_goes_first():
    """What becomes free is not taken ahead of it, for as long as it takes to ask again."""
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


def test_who_waits_wakes_nobody_where_nothing_is_read_ahead():
    """There is nothing that would go on after it."""
    world = reading_world(num_slots=1, prefetch_bytes=0, admission=Admission.ON_EVICT)
    store(world, A, ONES)
    assert prepare_store(world, B, TWOS).refused == "wait"
    assert world.engine.next_deadline_ns() is None


def test_nothing_is_read_ahead_at_the_end():
    """Not even for a queue that is reported then."""
    world = reading_world()
    store_on_ssd(world, {A: 2})
    world.engine.write_dirty()
    queue(world, A)
    assert not world.io


def test_what_a_waiting_session_shares_stays_for_it():
    """Though the only session that had it in DRAM is the first to give way."""
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
    """A store finds its slots free, and they are freed again after it."""
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


def test_loads_may_use_the_watermark_and_what_is_read_ahead_may_not():
    """Reading ahead makes room for itself, or does without."""
    world = reading_world(num_slots=10, watermark=0.2)
    store_on_ssd(world, {A: 12})
    queue(world, A)
    finish_reads(world)
    assert tiers_of(world, A).count("DS") == 8
    answer = prepare_load(world, A, tokens_of(A, 12))
    assert len(answer.spans) == 10


def test_the_watermark_has_resting_blocks_written():
    """What is dirty, and would be written only when its room is wanted, is wanted then."""
    world = reading_world(num_slots=10, watermark=0.2, admission=Admission.ON_EVICT)
    store(world, A, tokens_of(A, 8))
    assert not world.io_of(WriteBlock)
    store(world, B, TWOS, settle=False)
    assert len(world.io_of(WriteBlock)) == 1
    world.quiesce()
    assert tiers_of(world, A) == ["D"] * 7 + ["S"]
    assert counter(world, "sessions_dropped") == 0


@pytest.mark.parametrize(("num_slots", "num_read", "num_wasted"), [(32, 29, 0), (8, 7, 2)])
def test_slots_are_left_for_the_stores_of_turns_that_run(num_slots, num_read, num_wasted):
    """About as many as they ask for, lest what was read ahead is evicted for them; not all."""
    world = reading_world(num_slots=num_slots)
    store_on_ssd(world, {B: 40})
    for _ in range(40):  # a running mean
        store(world, A, tokens_of(A, 3))
        world.engine.sessions.flush(A, dry_run=False)
        world.pump()
    world.quiesce()
    waiting = queue_of(B).waiting
    change = QueueChange(waiting, [RunningRequest(99, A)])
    world.engine.engines.replace_queue(ENGINE_ID, change)
    world.pump()
    finish_reads(world)
    assert tiers_of(world, B).count("DS") == num_read
    assert prepare_store(world, A, tokens_of(A, 3)).blocks
    assert counter(world, "prefetch_wasted") == num_wasted


# ---------------------------------------------------------------------------------- loads and reads


def test_a_load_joins_a_read_that_is_under_way():
    """It is not read twice; the performer gets the reads that became urgent."""
    world = reading_world()
    store_on_ssd(world, {A: 2})
    queue(world, A)
    ahead = world.io_of(ReadBlock)
    answer = prepare_load(world, A, tokens_of(A, 2))
    assert answer.lookup is Lookup.PENDING
    assert world.io_of(ReadBlock) == ahead
    assert world.tracked[answer.lease_id] == tuple(ahead)
    assert counter(world, "prefetch_late") == 2
    finish_reads(world)
    assert world.engine.loads.settle(answer.lease_id).end_token == 8
    assert (counter(world, "prefetch_hits"), counter(world, "prefetch_blocks")) == (0, 2)


def test_a_load_makes_room_for_the_next_read():
    """What it has come to wait for counts as a load's from then on, not as read ahead."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 1, B: 1})
    queue(world, A, B)
    assert being_read(world) == [A]
    prepare_load(world, A, ONES)
    assert being_read(world) == [A, B]


def test_a_session_that_cannot_come_in_time_yields_to_one_that_can():
    """And is read after it all the same."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 4, B: 1, C: 1})
    prepare_load(world, C, THREES)
    world.now_ns += 100  # the time a block takes
    world.finish_all(ReadBlock)
    requests = queue_of(A, B)
    world.engine.engines.replace_queue(ENGINE_ID, QueueChange(requests.waiting, interval_ns=150))
    world.pump()
    assert finish_reads(world) == [B, A, A, A, A]


def test_what_comes_in_time_keeps_its_turn():
    """As above, with a slower engine."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 4, B: 1, C: 1})
    prepare_load(world, C, THREES)
    world.now_ns += 100
    world.finish_all(ReadBlock)
    requests = queue_of(A, B)
    world.engine.engines.replace_queue(ENGINE_ID, QueueChange(requests.waiting, interval_ns=400))
    world.pump()
    assert finish_reads(world) == [A, A, A, A, B]


# ----------------------------------------------------------------------------------------- failures


def test_a_corrupt_block_cuts_its_session_and_harms_no_other():
    """As in a load: there is no other copy. What follows it is gone with it."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3, B: 1})
    queue(world, A, B)
    world.finish_io(world.io_of(ReadBlock)[0])
    world.finish_io(world.io_of(ReadBlock)[0], IoOutcome.CORRUPT)
    assert tiers_of(world, A) == ["DS"]
    assert finish_reads(world) == [B]
    assert counter(world, "blocks_corrupt_ssd") == 1


def test_a_read_that_fails_is_not_tried_for_ever():
    """Nothing is read ahead for a while; then the others are, and a load tries it again."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 2, B: 1})
    queue(world, A, B)
    world.finish_io(world.io_of(ReadBlock)[0], IoOutcome.TRANSIENT)
    assert not world.io
    assert world.engine.next_deadline_ns() == world.now_ns + RETRY_NS
    wait(world, RETRY_NS)
    assert finish_reads(world) == [A, B]
    assert tiers_of(world, A) == ["S", "DS"]
    wait(world, 10 * RETRY_NS)
    assert not world.io
    assert load(world, A, tokens_of(A, 2)).end_token == 8


def test_a_session_flushed_while_it_is_read_leaves_nothing():
    """Its blocks come, and nobody wants them."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3})
    queue(world, A)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]
    assert counter(world, "prefetch_wasted") == 1


def test_reading_and_evicting_do_not_keep_each_other_going():
    """However often stores evict what was read ahead for a turn that does not come."""
    world = reading_world(num_slots=4)
    store_on_ssd(world, {A: 3})
    for index in range(20):
        queue(world, A)
        world.quiesce()
        # a turn before it needs all of DRAM, and is over
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


def test_a_queue_that_does_not_fit_comes_to_rest():
    """Sessions are read until DRAM is full of what is needed soonest, and then no more."""
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


def test_a_new_kvd_reads_ahead_for_the_queue_that_is_reported():
    """It knows how large sessions are on average from what it finds."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 2, B: 2})
    world.quiesce()
    world.start()
    assert not world.io
    queue(world, B, A)
    assert finish_reads(world) == [B, B, A, A]


def test_an_arena_that_is_given_up_is_not_filled_again():
    """Until an engine has a queue again."""
    world = expecting_world(num_slots=4)
    store(world, A, ONES)
    lease = prepare_load(world, A, ONES)
    store(world, B, TWOS)
    assert not world.engine.release_dram()
    world.pump()
    wait(world, 10 * LOOK_NS)
    assert not world.io
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    assert world.engine.release_dram()


# ----------------------------------------------------------------------------------- who may return


def test_sessions_that_are_likely_to_return_come_into_idle_room():
    """Once between two uses, whatever becomes of it."""
    world = expecting_world(num_slots=4)
    store_on_ssd(world, {A: 2, B: 1})
    queue(world)
    wait(world, LOOK_NS)
    assert sorted(finish_reads(world)) == [A, A, B]
    store(world, C, [9] * 16)
    world.engine.sessions.flush(C, dry_run=False)
    world.pump()
    for _ in range(4):
        wait(world, LOOK_NS)
        world.quiesce()
    assert (tiers_of(world, A), tiers_of(world, B)) == (["S", "S"], ["S"])
    assert counter(world, "prefetch_wasted") == counter(world, "prefetch_blocks") == 3


def test_nobody_gives_way_to_one_that_is_only_likely():
    """But sessions that have ended, and those whose engine has their KV."""
    world = expecting_world(num_slots=2)
    store_on_ssd(world, {A: 1})
    store(world, B, TWOS)
    store(world, C, THREES)
    queue(world)
    wait(world, LOOK_NS)
    assert not world.io
    world.engine.sessions.end(B)
    world.pump()
    wait(world, LOOK_NS)
    assert finish_reads(world) == [A]
    assert (tiers_of(world, B), tiers_of(world, C)) == (["S"], ["DS"])


def test_a_waiting_turn_goes_before_likely_ones():
    """Nothing more is read for them meanwhile, and they give way."""
    world = expecting_world(num_slots=3)
    store_on_ssd(world, {A: 3})
    store_on_ssd(world, {B: 3})
    queue(world, B)
    wait(world, LOOK_NS)
    assert finish_reads(world) == [B, B, B]
    wait(world, LOOK_NS)
    assert not world.io


def test_reading_for_likely_ones_can_be_switched_off():
    """reads_returning = False; then no time is waited for either."""
    world = expecting_world(reads_returning=False)
    store_on_ssd(world, {A: 1})
    queue(world)
    wait(world, LOOK_NS)
    assert not world.io
    assert world.engine.next_deadline_ns() is None


# ----------------------------------------------------------------------------------- running turns


def test_a_running_session_gives_its_room_when_its_engine_has_its_kv():
    """Not before, and only what SSD holds."""
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


def test_the_last_copy_of_a_running_session_is_not_cut_first():
    """Its engine will store what is new: that needs what was there before."""
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
def test_no_policy_writes_what_is_clean(policy):
    """CacheWorld asserts it of every write: through evictions, reads ahead and new turns."""
    world = reading_world(num_slots=6, policy=policy, watermark=0.2)
    for turn in range(1, 4):
        for key in (A, B, C):
            queue(world, *[other for other in (A, B, C) if other != key])
            load(world, key, tokens_of(key, turn - 1))
            store(world, key, tokens_of(key, turn))
    assert counter(world, "ssd_written_bytes") == 9 * BLOCK_BYTES
    assert counter(world, "ssd_read_bytes") % BLOCK_BYTES == 0


def test_a_request_of_another_rank_is_read_in_its_new_order():
    """A delta that only moves a request moves its session."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 1, B: 1, C: 1})
    queue(world, A, B, C)
    change = QueueChange([QueuedRequest((-1, 0.0, 2), C)])
    world.engine.engines.change_queue(ENGINE_ID, change)
    world.pump()
    assert finish_reads(world) == [A, C, B]


def test_a_turn_that_starts_as_the_one_before_it_ends_is_loaded_anew():
    """That an engine had the session's KV for the last turn does not release it in this one."""
    world = reading_world(num_slots=3)
    store(world, B, TWOS)
    store(world, A, ONES)
    store(world, C, THREES)
    run(world, A)
    load(world, A, ONES)
    change = QueueChange(running=[RunningRequest(100, A)], left=[99])
    world.engine.engines.change_queue(ENGINE_ID, change)
    world.pump()
    store(world, C, tokens_of(C, 2))
    assert [tiers_of(world, key) for key in (A, B)] == [["DS"], ["S"]]


def test_the_smallest_budget_and_arena_are_enough():
    """One read at a time, into the only slot there is."""
    world = reading_world(num_slots=1, prefetch_bytes=1)
    store_on_ssd(world, {A: 1})
    queue(world, A)
    assert being_read(world) == [A]


def test_what_was_begun_for_a_session_is_left_when_reading_stops():
    """It may be packed again, as others may."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3})
    queue(world, A)
    finish_reads_of(world, 1)
    assert world.engine._state.tails.kept_unpacked == A
    world.engine.release_dram()
    assert world.engine._state.tails.kept_unpacked is None


def finish_reads_of(world, num_reads):
    for _ in range(num_reads):
        world.finish_io(world.io_of(ReadBlock)[0])


def test_likely_sessions_are_looked_for_now_and_then():
    """Not before something is stored, nor while as much as may be is read."""
    world = expecting_world()
    assert world.engine.next_deadline_ns() is None
    store(world, A, ONES)
    wait(world, LOOK_NS)
    assert world.engine.next_deadline_ns() == world.now_ns + LOOK_NS
    wait(world, LOOK_NS - 1)
    assert world.engine.next_deadline_ns() == world.now_ns + 1
