"""Reading ahead for idle sessions that are only likely to return."""

from kvd.core.io.prefetching import LOOK_NS
from tests.kvd.core.io.reading_worlds import expecting_world, finish_reads, queue, store_on_ssd
from tests.kvd.core.turns import ONES, THREES, TWOS, A, B, C, counter, store, tiers_of, wait


def test_likely_sessions_are_read_into_free_room():
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


def test_no_session_gives_way_to_a_likely_one():
    """Except ended sessions, and those whose engine has their KV."""
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


def test_a_waiting_turn_goes_before_likely_sessions():
    """Reads for them pause, and they give way."""
    world = expecting_world(num_slots=3)
    store_on_ssd(world, {A: 3})
    store_on_ssd(world, {B: 3})
    queue(world, B)
    wait(world, LOOK_NS)
    assert finish_reads(world) == [B, B, B]
    wait(world, LOOK_NS)
    assert not world.io


def test_reading_likely_sessions_can_be_switched_off():
    """With reads_returning = False there is no timer for them, either."""
    world = expecting_world(reads_returning=False)
    store_on_ssd(world, {A: 1})
    queue(world)
    wait(world, LOOK_NS)
    assert not world.io
    assert world.engine.next_deadline_ns() is None


def test_likely_sessions_are_searched_periodically():
    """Not before a session is stored, nor while reading is at its bound."""
    world = expecting_world()
    assert world.engine.next_deadline_ns() is None
    store(world, A, ONES)
    wait(world, LOOK_NS)
    assert world.engine.next_deadline_ns() == world.now_ns + LOOK_NS
    wait(world, LOOK_NS - 1)
    assert world.engine.next_deadline_ns() == world.now_ns + 1
