"""Eviction: which sessions give up which blocks, in which order, and what stays."""

import pytest

from kvd.core.eviction.policies import POLICIES, LruPolicy
from kvd.core.eviction.policy import PolicyContext
from kvd.core.eviction.queue_window import QueueWindow
from kvd.core.eviction.session_order import Guard
from kvd.core.io.placement import Placement
from kvd.core.records.actions import WriteBlock
from kvd.core.records.entries import Pin
from kvd.core.records.tier import Admission, Tier
from kvd.core.state.limits import Limits
from kvd.core.state.session_history import MoveKind
from shared.types.queue_delta import RunningRequest
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
from tests.property.cache_world import CacheWorld
from tests.queue_changes import queue_change

CONTEXT = PolicyContext(QueueWindow(lambda _keys, _unqueued: None), lambda: 0)


def test_the_coldest_session_leaves_dram_tail_first():
    """Clean blocks of the least recently used session go, its last block first."""
    world = new_world(num_slots=4)
    store(world, A, ONES + TWOS)
    store(world, B, TWOS + THREES)
    load(world, A, ONES + TWOS)
    store(world, C, THREES)
    assert tiers_of(world, A) == ["DS", "DS"]
    assert tiers_of(world, B) == ["DS", "S"]
    assert counter(world, "evictions_dram") == 1


def test_a_shared_block_stays_with_the_warmer_session():
    """Evicting the colder session skips blocks that the warmer one uses."""
    world = new_world(num_slots=3)
    store(world, A, ONES + TWOS)
    store(world, B, ONES + THREES)
    store(world, C, THREES + TWOS)  # two slots: all of A's blocks are examined, then B's last
    assert tiers_of(world, A) == ["DS", "S"]
    assert tiers_of(world, B) == ["DS", "S"]
    assert tiers_of(world, C) == ["DS", "DS"]


def test_a_shared_block_goes_when_all_its_sessions_have_been_passed():
    """Sharing protects no block for ever."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    store(world, B, ONES)
    store(world, C, TWOS + THREES)
    assert tiers_of(world, A) == tiers_of(world, B) == ["S"]


def test_a_pinned_session_stays_in_dram():
    """Pins protect from eviction until they are removed."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, TWOS)
    store(world, C, THREES)
    assert tiers_of(world, A) == ["DS"]
    assert tiers_of(world, B) == ["S"]
    world.engine.sessions.pin(A, Pin.NONE)
    load(world, C, THREES)
    store(world, B, TWOS + ONES)
    assert tiers_of(world, A) == ["S"]


def test_a_block_shared_with_a_pinned_session_stays():
    """Its other users may be evicted; a hard-pinned session has no rank, and protects it."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    store(world, B, ONES + TWOS)
    world.engine.sessions.pin(A, Pin.HARD)
    answer = store(world, C, THREES + ONES)
    assert (answer.end_token, answer.more) == (4, True), "one slot of two could be had"
    assert (tiers_of(world, A), tiers_of(world, B)) == (["DS"], ["DS", "S"])
    world.engine.sessions.pin(A, Pin.NONE)
    store(world, C, THREES + ONES)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["S"], ["S", "S"])


def test_a_soft_pinned_session_goes_last():
    """It goes after all others, queued ones too.

    A new block without a better claim is not written.
    """
    world = new_world(num_slots=2, num_extents=3, policy="lookahead_queue")
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.SOFT)
    store(world, B, TWOS)
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(B))
    store(world, C, THREES)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["DS"], ["S"])
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(C, B))
    store(world, C, THREES + ONES)
    assert world.engine.inspection.info(B) is None
    assert (tiers_of(world, A), tiers_of(world, C)) == (["DS"], ["S", "DS"])
    store(world, C, THREES + ONES + TWOS)
    assert (tiers_of(world, A), tiers_of(world, C)) == (["DS"], ["S", "S", "D"])
    assert counter(world, "ssd_refused")
    store(world, C, THREES + ONES + TWOS + THREES)
    assert tiers_of(world, A) == ["S"], "nothing else was left in DRAM"


def test_a_hard_pin_that_becomes_soft_makes_clean_blocks_available():
    """The session had no rank before; now it gives its blocks when there are no others."""
    world = new_world(num_slots=1)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    assert store(world, B, TWOS).refused == "no_space"
    world.engine.sessions.pin(A, Pin.SOFT)
    world.engine.check()  # another session offers its clean block
    store(world, B, TWOS)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["S"], ["DS"])


def test_a_session_is_a_victim_again_after_its_soft_pin():
    """Its place is that of a session used just now; a soft pin keeps its earlier order."""
    policy = LruPolicy(CONTEXT)
    for key in (A, B, C):
        policy.on_access(key, 0)
    policy.guard(A, Guard.PINNED)
    policy.guard(B, Guard.PINNED)
    assert list(policy.victims(Tier.DRAM, 0)) == [C, A, B]
    policy.on_evict(A, Tier.DRAM)
    policy.guard(A, Guard.NONE)
    assert list(policy.victims(Tier.DRAM, 0)) == [C, B]
    assert list(policy.victims(Tier.SSD, 0)) == [C, A, B]
    policy.on_remove(B)
    policy.on_access(B, 0)
    assert list(policy.victims(None, 0)) == [C, A, B]


def test_a_leased_block_stays_in_dram():
    """Blocks that an engine reads are not evicted."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    lease = prepare_load(world, A, ONES)
    store(world, B, TWOS)
    store(world, C, THREES)
    assert tiers_of(world, A) == ["DS"]
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)


def test_an_ended_session_goes_first_until_it_is_used_again():
    """EndSession is the strongest hint there is."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert world.engine.sessions.end(B)
    store(world, C, THREES)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["DS"], ["S"])
    load(world, B, TWOS)
    assert not world.engine.inspection.info(B).ended


def test_a_queued_session_goes_last():
    """A session whose turn waits keeps its blocks as long as others have some."""
    world = new_world(num_slots=2, policy="lookahead_queue")
    store(world, A, ONES)
    store(world, B, TWOS)
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A))
    assert world.engine.engines.num_requests(ENGINE_ID)[0] == 1
    store(world, C, THREES)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["DS"], ["S"])
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A, C))
    store(world, B, TWOS + ONES)
    assert (tiers_of(world, A), tiers_of(world, C)) == (["DS"], ["S"]), "the tail goes first"


@pytest.mark.parametrize("is_running", [False, True])
def test_blocks_stored_by_a_running_turn_may_leave_dram(is_running):
    """Its engine has these rows; it has yet to load the blocks stored before the turn began."""
    world = new_world(num_slots=2)
    starts = queue_change(running=[RunningRequest(0, A)])
    world.engine.engines.replace_queue(ENGINE_ID, starts if is_running else queue_change())
    store(world, A, ONES)
    world.engine.engines.replace_queue(ENGINE_ID, starts)
    store(world, B, TWOS)
    store(world, C, THREES)
    assert (tiers_of(world, A) == ["S"]) == is_running
    assert (tiers_of(world, B) == ["S"]) == (not is_running)


def test_without_ssd_the_coldest_sessions_are_cut():
    """Dirty blocks go tail first; a session that loses all is dropped, others keep a prefix."""
    world = new_world(num_slots=4, num_extents=0)
    store(world, A, ONES + TWOS)
    store(world, B, TWOS + THREES)
    store(world, C, THREES)
    assert world.engine.inspection.info(A).num_tokens == 4
    assert load(world, A, ONES + TWOS, from_token=4).miss_reason == "evicted"
    store(world, C, THREES + ONES + TWOS + ONES)
    assert world.engine.inspection.info(B) is None
    assert counter(world, "sessions_dropped") == 2


def test_without_ssd_a_shared_block_stays_with_the_warmer_session():
    """Private blocks of a colder session are cut before it, though it was used later."""
    world = new_world(num_slots=2, num_extents=0)
    store(world, A, ONES)
    store(world, C, TWOS)
    store(world, B, ONES)
    store(world, C._replace(session_id="d"), THREES)
    assert tiers_of(world, A) == tiers_of(world, B) == ["D"]
    assert world.engine.inspection.info(C) is None


def test_a_small_ssd_keeps_the_warmest_sessions():
    """Rows of the coldest session make room; blocks that are then in no tier are cut."""
    world = new_world(num_slots=2, num_extents=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES)
    assert tiers_of(world, A) == ["S"] or tiers_of(world, A) == ["DS"]
    assert tiers_of(world, B) == ["DS"]
    assert counter(world, "evictions_ssd") == 1


def test_a_block_evicted_from_ssd_but_in_dram_is_dirty_again():
    """Leaving SSD loses no bytes that DRAM still has; they are written again with their session."""
    world = new_world(num_slots=4, num_extents=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES)
    assert tiers_of(world, A) == ["DS", "D"]
    assert world.engine.inspection.info(A).dirty_bytes == world.engine.layout.block_bytes
    store(world, A, ONES + TWOS)
    assert tiers_of(world, A) == ["DS", "DS"]
    assert tiers_of(world, B) == ["D"]


def test_a_session_larger_than_ssd_keeps_its_tail_in_dram_only():
    """A session never evicts its own prefix for its tail; the rest is refused, and counted."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES + TWOS)
    assert tiers_of(world, A) == ["DS", "D"]
    assert counter(world, "ssd_refused") == 1


def test_policies_are_created_by_name():
    """The table has each under its configured name."""
    for name, make_policy in POLICIES.items():
        assert make_policy(CONTEXT).name == name


def test_lru_ranks_by_last_use():
    """Touching moves to the warm end, ending to the cold end, entering happens at the warm end."""
    policy = LruPolicy(CONTEXT)
    for key in (A, B, C):
        policy.on_access(key, 0)
    policy.on_access(A, 1)
    policy.on_end(C)
    assert list(policy.victims(Tier.SSD, 0)) == list(policy.victims(None, 0)) == [C, B, A]
    policy.on_evict(B, Tier.SSD)
    assert not policy.ranks(B, Tier.SSD)
    policy.on_insert(B, Tier.SSD)
    policy.on_remove(A)
    policy.on_end(A)
    assert list(policy.victims(Tier.SSD, 0)) == [C, B]


class CountingPolicy(LruPolicy):
    """Counts the sessions that were examined for room in DRAM."""

    num_looked_at = 0

    def victims(self, tier, now_ns, *, giving_way_to=None, clean=False):
        for key in super().victims(tier, now_ns, giving_way_to=giving_way_to, clean=clean):
            self.num_looked_at += tier is Tier.DRAM
            yield key


def test_an_arena_full_of_dirty_blocks_is_not_searched():
    """A store that has to wait does not examine every session, however often it asks."""
    limits = Limits(num_slots=16, num_extents=64, admission=Admission.ON_EVICT)
    world = CacheWorld(limits, CountingPolicy)
    policy = world.engine._state.policy
    for index in range(16):
        store(world, A._replace(session_id=f"s{index}"), [index] * 4)
    assert world.engine.inspection.stats().dirty_bytes == 16 * world.engine.layout.block_bytes
    for _ in range(3):
        answer = prepare_store(world, A, [99] * 4)
        assert answer.refused == "wait"
    assert policy.num_looked_at <= 1, "the coldest, which is written"


def _full_of_dirty_blocks(num_sessions: int):
    """Make a world with full DRAM: one clean block, of A, and dirty ones of as many sessions."""
    limits = Limits(num_slots=num_sessions + 1, num_extents=64)
    world = CacheWorld(limits, CountingPolicy)
    store(world, A, ONES)
    for index in range(num_sessions):
        store(world, _key(index), [100 + index] * 4, settle=False)
    return world, world.engine._state.policy


def _key(index: int):
    return A._replace(session_id=f"s{index}")


@pytest.mark.parametrize("how", ["leased", "pinned"])
def test_a_clean_block_that_cannot_go_is_examined_once(how):
    """Waiting stores examine no session again before one of its blocks may go."""
    world, policy = _full_of_dirty_blocks(16)
    if how == "leased":
        prepare_load(world, A, ONES)
    else:
        world.engine.sessions.pin(A, Pin.HARD)
    looks = []
    for _ in range(4):
        policy.num_looked_at = 0
        assert prepare_store(world, B, [99] * 4).refused == "wait"
        looks.append(policy.num_looked_at)
    assert looks[0] <= 1
    assert looks[1:] == [0, 0, 0]


def test_a_block_that_becomes_clean_is_found_among_many():
    """A store that was answered "wait" gets the written block, and examines no other session."""
    world, policy = _full_of_dirty_blocks(16)
    prepare_load(world, A, ONES)
    assert prepare_store(world, B, [99] * 4).refused == "wait"
    written = max(world.io_of(WriteBlock))  # a block of the warmest session
    world.finish_io(written)
    policy.num_looked_at = 0
    assert prepare_store(world, B, [99] * 4).lease_id
    assert policy.num_looked_at == 1
    assert tiers_of(world, _key(15)) == ["S"]


def test_a_released_block_may_go_at_once():
    """After its lease its session has a clean block again."""
    world, policy = _full_of_dirty_blocks(16)
    held = prepare_load(world, A, ONES)
    assert prepare_store(world, B, [99] * 4).refused == "wait"
    world.engine.loads.complete(held.lease_id, ENGINE_ID)
    world.pump()
    policy.num_looked_at = 0
    assert prepare_store(world, B, [99] * 4).lease_id
    assert policy.num_looked_at == 1
    assert tiers_of(world, A) == ["S"]


def test_a_shared_block_that_was_in_use_is_kept_by_its_last_user():
    """Its users were examined in vain while it was leased; its last user is the warmest."""
    world = new_world(num_slots=3)
    store(world, A, ONES)
    store(world, B, ONES)
    held = prepare_load(world, A, ONES)
    store(world, C, TWOS + THREES)
    store(world, C._replace(session_id="d"), [9] * 8)
    world.engine.loads.complete(held.lease_id, ENGINE_ID)
    world.pump()
    assert tiers_of(world, A) == ["DS"]
    world.engine.sessions.end(A)
    load(world, B, ONES)
    store(world, C._replace(session_id="e"), [7] * 4)
    assert tiers_of(world, A) == tiers_of(world, B) == ["DS"]


def test_a_session_without_clean_blocks_makes_no_room_by_being_idle():
    """Its turns have ended, but its blocks are not on SSD yet."""
    world = new_world(admission=Admission.ON_EVICT)
    placement = Placement(world.engine._state)
    store(world, A, ONES)
    world.engine.sessions.end(A)
    assert not placement.has_idle()
    world.engine.writes.write_all()
    world.pump()
    world.quiesce()
    assert placement.has_idle()


def test_evictions_are_counted_and_reported():
    """Blocks by tier, and sessions that lost all; packed blocks like the others."""
    world = new_world(num_slots=2, num_extents=4)
    store(world, A, ONES + TWOS)
    store(world, B, THREES + ONES)
    assert (counter(world, "evictions_dram"), counter(world, "evictions_ssd")) == (2, 0)
    assert tiers_of(world, A) == ["S", "S"]
    moves = [move.kind for move in world.engine.inspection.history.of(A)]
    assert MoveKind.EVICTED_DRAM in moves
    store(world, C, TWOS + THREES + ONES[:1])
    assert counter(world, "evictions_ssd") == 1 + counter(world, "sessions_dropped")
    assert MoveKind.CUT in {move.kind for move in world.engine.inspection.history.of(A)}


def test_a_block_that_leaves_only_ssd_is_reported():
    """Its copy in DRAM stays, and is the only one."""
    world = new_world(num_slots=4, num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS)
    moves = [move.kind for move in world.engine.inspection.history.of(A)]
    assert moves == [MoveKind.STORED, MoveKind.WRITTEN, MoveKind.EVICTED_SSD]
    assert (counter(world, "evictions_ssd"), counter(world, "sessions_dropped")) == (1, 0)


def test_sessions_that_are_dropped_for_room_are_counted():
    """Each counts once, however many blocks it had, and in whichever tiers."""
    world = new_world(num_slots=4, num_extents=0)
    store(world, A, ONES + TWOS)
    store(world, B, THREES)
    store(world, C, [7] * 16)
    assert counter(world, "sessions_dropped") == 2
    assert world.engine.inspection.keys() == [C]
