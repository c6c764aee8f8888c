"""Reading ahead: its order, its room, and what ends it."""

import pytest

from kvd.core.io.prefetching import LOOK_NS, MOST_STEPS, plan_session
from kvd.core.io.reading import RETRY_NS
from kvd.core.records.actions import Emit, IoOutcome, ReadBlock
from shared.types.granted_slots import Lookup
from shared.types.queue_delta import QueuedRequest, RunningRequest
from tests.kvd.core.io.reading_worlds import (
    BLOCK_BYTES,
    ONE,
    being_read,
    expecting_world,
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
    complete_store,
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

OTHER_ENGINE_ID = 2


def test_waiting_sessions_are_read_in_the_order_of_the_queue():
    """Block by block, each session completely; then a load finds it in DRAM."""
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


def test_active_reads_are_bounded():
    """By bytes; the next read begins when one ends."""
    world = reading_world(prefetch_bytes=2 * BLOCK_BYTES)
    store_on_ssd(world, {A: 4})
    queue(world, A)
    assert len(world.io_of(ReadBlock)) == 2
    world.finish_io(world.io_of(ReadBlock)[0])
    assert len(world.io_of(ReadBlock)) == 2
    assert all(world.io[op_id].ahead for op_id in world.io_of(ReadBlock))


def test_one_call_begins_a_bounded_number_of_reads():
    """It asks to be called again at once: the rest need not wait for another event."""
    world = reading_world(num_slots=32)
    store_on_ssd(world, {A: MOST_STEPS + 2})
    queue(world, A)
    assert being_read(world) == [A] * MOST_STEPS
    assert world.engine.next_deadline_ns() == world.now_ns
    wait(world, 0)
    assert being_read(world) == [A] * (MOST_STEPS + 2)


def test_only_the_window_is_read():
    """L_pw = C_mem / S_kv requests, even if there is room for more."""
    world = reading_world(num_slots=6)
    store_on_ssd(world, {C: 4, A: 1, B: 1})
    queue(world, A, B, C)
    assert finish_reads(world) == [A, B, C, C, C, C], "a mean of 2 blocks: 3 jobs"
    world = reading_world(num_slots=5)
    store_on_ssd(world, {C: 4, A: 1, B: 1})
    queue(world, A, B, C)
    assert finish_reads(world) == [A, B]


@pytest.mark.parametrize("policy", ["lru", "fifo"])
def test_policies_without_look_ahead_read_nothing(policy):
    """They are the baselines for looking ahead."""
    world = reading_world(policy=policy)
    store_on_ssd(world, {A: 2})
    queue(world, A)
    assert not world.io


def test_without_a_budget_nothing_is_read_ahead():
    """prefetch_bytes = 0."""
    world = reading_world(prefetch_bytes=0)
    store_on_ssd(world, {A: 2})
    queue(world, A)
    assert not world.io


def test_a_change_of_the_queue_takes_effect_with_the_next_block():
    """Reads that have begun end; sessions that are now needed sooner come next."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3, B: 2})
    queue(world, A, B)
    assert being_read(world) == [A]
    queue(world, B, A)
    assert finish_reads(world) == [A, B, B, A, A]
    assert counter(world, "prefetch_cancelled") == 0


def test_a_turn_that_leaves_ends_its_reads():
    """The blocks that were read stay; the rest of the session is packed again."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 4})
    queue(world, A)
    queue(world)
    assert finish_reads(world) == [A]
    assert counter(world, "prefetch_cancelled") == 1
    assert tiers_of(world, A) == ["DS", "S", "S", "S"]
    assert world.engine._state.sessions[A].num_packed == 3


@pytest.mark.parametrize("how", ["remove", "detach"])
def test_a_lost_engine_ends_reading(how):
    """Its queue is removed with its connection; another engine's stays."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3, B: 2})
    queue(world, A)
    queue(world, B, engine_id=OTHER_ENGINE_ID)
    getattr(world.engine.engines, how)(ENGINE_ID)
    world.pump()
    assert finish_reads(world) == [A, B, B]


def test_a_turn_that_starts_keeps_its_blocks():
    """Its load asks for the rest."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3})
    queue(world, A)
    run(world, A)
    assert counter(world, "prefetch_cancelled") == 0
    assert finish_reads(world) == [A]
    assert load(world, A, tokens_of(A, 3)).end_token == 12


def test_sessions_in_dram_are_not_read():
    """Nor is one that is not stored at all."""
    world = reading_world()
    store(world, A, ONES)
    queue(world, A, B)
    assert not world.io
    store(world, B, TWOS)
    assert not world.io


def test_a_load_joins_an_active_read():
    """It is not read twice; the performer is told which reads became urgent."""
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
    """Reads that a load waits for do not count as read ahead any more."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 1, B: 1})
    queue(world, A, B)
    assert being_read(world) == [A]
    prepare_load(world, A, ONES)
    assert being_read(world) == [A, B]


def test_a_session_that_would_be_late_yields_to_one_in_time():
    """It is read after the other all the same."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 4, B: 1, C: 1})
    prepare_load(world, C, THREES)
    world.now_ns += 100  # the time a block takes
    world.finish_all(ReadBlock)
    requests = queue_of(A, B)
    world.engine.engines.replace_queue(ENGINE_ID, queue_change(requests.waiting, interval_ns=150))
    world.pump()
    assert finish_reads(world) == [B, A, A, A, A]


def test_a_session_that_is_in_time_keeps_its_place():
    """As above, with a slower engine."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 4, B: 1, C: 1})
    prepare_load(world, C, THREES)
    world.now_ns += 100
    world.finish_all(ReadBlock)
    requests = queue_of(A, B)
    world.engine.engines.replace_queue(ENGINE_ID, queue_change(requests.waiting, interval_ns=400))
    world.pump()
    assert finish_reads(world) == [A, A, A, A, B]


def test_a_corrupt_block_cuts_only_its_session():
    """As in a load: there is no other copy, and later blocks are lost with it."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3, B: 1})
    queue(world, A, B)
    world.finish_io(world.io_of(ReadBlock)[0])
    world.finish_io(world.io_of(ReadBlock)[0], IoOutcome.CORRUPT)
    assert tiers_of(world, A) == ["DS"]
    assert finish_reads(world) == [B]
    assert counter(world, "blocks_corrupt_ssd") == 1


def test_a_failed_read_is_not_repeated_for_ever():
    """Reading ahead pauses; then the other blocks are read, and a load tries this one again."""
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
    """Its blocks arrive, and are dropped."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 3})
    queue(world, A)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]
    assert counter(world, "prefetch_wasted") == 1


def test_blocks_that_the_session_no_longer_uses_are_not_read():
    """It has other tokens than its plan; another session has the old ones."""
    world = reading_world(packs_sessions=False)
    store_on_ssd(world, {A: 3})
    assert not prepare_store(world, B, tokens_of(A, 3)).lease_id  # all blocks are in DRAM
    state = world.engine._state
    plan = plan_session(state, A, is_waiting=True)
    first, second, _ = plan.missing
    complete_store(world, prepare_store(world, A, tokens_of(A, 1) + tokens_of(C, 1)))
    assert plan.next_block(state) is state.blocks[first]
    plan.record_begun(state)
    assert state.blocks[second].users == {B: None}
    assert plan.next_block(state) is None


def test_a_restarted_kvd_reads_ahead_for_the_reported_queue():
    """It knows the mean size of sessions from the restored ones."""
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


def test_a_request_with_a_new_rank_is_read_in_its_new_order():
    """A delta that only moves a request moves its session."""
    world = reading_world(prefetch_bytes=ONE)
    store_on_ssd(world, {A: 1, B: 1, C: 1})
    queue(world, A, B, C)
    change = queue_change([QueuedRequest((-1, 0.0, 2), C)])
    world.engine.engines.change_queue(ENGINE_ID, change)
    world.pump()
    assert finish_reads(world) == [A, C, B]


def test_a_turn_that_follows_another_is_loaded_again():
    """That the engine had the session's KV for the last turn does not release it in this one."""
    world = reading_world(num_slots=3)
    store(world, B, TWOS)
    store(world, A, ONES)
    store(world, C, THREES)
    run(world, A)
    load(world, A, ONES)
    change = queue_change(running=[RunningRequest(100, A)], left=[99])
    world.engine.engines.change_queue(ENGINE_ID, change)
    world.pump()
    store(world, C, tokens_of(C, 2))
    assert [tiers_of(world, key) for key in (A, B)] == [["DS"], ["S"]]


def test_a_session_is_left_when_reading_stops():
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
