"""The users of a block, and those that answer for it, at a cost independent of their number."""

import pytest

from kvd.core.records.actions import SESSION_CUT, Emit
from kvd.core.records.entries import Pin
from kvd.core.records.tier import Tier
from kvd.core.state.block import Block
from shared.types.session_key import SessionKey
from tests.kvd.core.turns import (
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    counter,
    load,
    new_world,
    store,
    tiers_of,
)
from tests.property.cache_world import to_bytes

PROMPT = [number for block in range(4) for number in [100 + block] * 4]
PROMPT_BLOCKS = 4
FEW, MANY = 16, 48  # sessions; more take long, because all invariants are checked after each call


class CountedKey(SessionKey):
    """A session's key that counts its look-ups in tables, sets and orders."""

    num_looks = 0

    def __hash__(self):
        CountedKey.num_looks += 1
        return super().__hash__()


def _key(number: int) -> CountedKey:
    return CountedKey(A.tenant, A.model, f"s{number}")


def _with_conversations(num_sessions: int, num_slots: int):
    """Make a world in which conversations share a prompt, and have one own block each."""
    world = new_world(num_slots, num_extents=1 << 12)
    for number in range(num_sessions):
        store(world, _key(number), PROMPT + [1000 + number] * 4)
    return world


def _num_looks(step) -> int:
    CountedKey.num_looks = 0
    step()
    return CountedKey.num_looks


@pytest.mark.parametrize("how", ["flushed", "ended"])
def test_the_cost_of_evicting_does_not_grow_with_the_users_of_a_block(how):
    """Also when the last user of the shared blocks is gone, or goes first."""

    def looks_per_block(num_sessions: int) -> float:
        world = _with_conversations(num_sessions, num_sessions + PROMPT_BLOCKS)
        last = _key(num_sessions - 1)
        if how == "flushed":
            world.engine.sessions.flush(last, dry_run=False)
        else:
            world.engine.sessions.end(last)
        world.quiesce()
        tokens = [number for block in range(num_sessions - 8) for number in [5000 + block] * 4]
        looks = _num_looks(lambda: world.engine.stores.prepare(B, to_bytes(tokens), 0, 1))
        return looks / counter(world, "evictions_dram")

    assert looks_per_block(MANY) <= 1.5 * looks_per_block(FEW)


def test_room_on_ssd_costs_the_same():
    """Victims there share their prompt, too."""

    def looks_per_block(num_sessions: int) -> float:
        world = _with_conversations(num_sessions, num_sessions + PROMPT_BLOCKS)
        world.engine.sessions.end(_key(num_sessions - 1))
        looks = _num_looks(lambda: world.engine.writes.set_capacity(16))
        return looks / counter(world, "evictions_ssd")

    assert looks_per_block(MANY) <= 1.5 * looks_per_block(FEW)


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_cost_of_flushing_a_session_is_constant(dry_run):
    """Sessions that share all but one block go one after the other."""

    def looks_per_session(num_sessions: int) -> float:
        world = _with_conversations(num_sessions, num_sessions + PROMPT_BLOCKS)
        load(world, _key(0), PROMPT + [1000] * 4)
        looks = _num_looks(lambda: world.engine.sessions.flush(None, dry_run=dry_run))
        return looks / num_sessions

    assert looks_per_session(MANY) <= 1.5 * looks_per_session(FEW)


def test_flushing_one_of_many_does_not_examine_the_others():
    """Its private blocks are known without listing the users of the others."""

    def looks(num_sessions: int) -> int:
        world = _with_conversations(num_sessions, num_sessions + PROMPT_BLOCKS)
        return _num_looks(lambda: world.engine.sessions.flush(_key(3), dry_run=False))

    assert looks(MANY) == looks(FEW)


def test_users_answer_for_a_block_where_they_have_a_rank():
    """They begin and cease to with their places in the orders, and with hard pins."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    store(world, B, ONES)
    block = next(iter(world.engine._state.blocks))
    assert (block.num_answer(Tier.DRAM), block.num_answer(Tier.SSD)) == (2, 2)
    store(world, C, TWOS + THREES)
    assert (block.num_answer(Tier.DRAM), block.num_answer(Tier.SSD)) == (0, 2)
    for pin, answering in ((Pin.HARD, 1), (Pin.SOFT, 1), (Pin.HARD, 1), (Pin.NONE, 1)):
        world.engine.sessions.pin(A, pin)
        world.engine.check()
        assert (block.num_answer(Tier.DRAM), block.num_answer(Tier.SSD)) == (answering, 2)


def test_a_hard_pinned_user_keeps_a_shared_block():
    """An unpinned session comes and goes; the shared block stays in DRAM."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    store(world, B, ONES)
    assert store(world, C, TWOS + THREES).more
    assert tiers_of(world, A) == tiers_of(world, B) == ["DS"]


def test_a_block_survives_its_last_user_with_another():
    """The session that used it last is gone: the newest of the others takes its place."""
    world = new_world()
    for key in (A, B, C):
        store(world, key, ONES)
    block = next(iter(world.engine._state.blocks))
    load(world, A, ONES)
    assert block.last_user == A
    world.engine.sessions.flush(A, dry_run=False)
    assert block.last_user == C


def test_the_newest_user_is_found_after_others_left():
    """Others keep their order, and come after it when they return."""
    block = Block(b"k" * 16, 4)
    keys = [_key(number) for number in range(100)]
    block.users.update(dict.fromkeys(keys))
    for left in range(99, 0, -1):
        assert block.newest_user() == keys[left]
        del block.users[keys[left]]
    block.users[keys[50]] = None
    assert (block.newest_user(), list(block.users)) == (keys[50], [keys[0], keys[50]])


def test_a_session_that_loses_several_blocks_at_once_is_cut_once():
    """However many blocks it gives up, its spans are cut once, and one event reports it."""
    world = new_world(num_slots=6, num_extents=0)
    store(world, A, [token for number in range(5) for token in [number] * 4])
    store(world, B, [8] * 4 + [9] * 12)
    cut = [e.key for e in world.events if isinstance(e, Emit) and e.name == SESSION_CUT]
    assert cut == [A]
    assert counter(world, "evictions_dram") == 3
    assert tiers_of(world, A) == ["D", "D"]


def test_a_block_written_late_is_evicted_in_its_sessions_turn():
    """Its session had no blocks on SSD; it answers for the block without using it."""
    world = new_world(num_extents=1)
    store(world, A, ONES)
    store(world, B, TWOS)
    assert (tiers_of(world, A), tiers_of(world, B)) == (["D"], ["DS"])
    world.engine.writes.set_capacity(2)
    world.quiesce()
    assert tiers_of(world, A) == ["DS"]
    world.engine.writes.set_capacity(1)
    world.quiesce()
    assert (tiers_of(world, A), tiers_of(world, B)) == (["D"], ["DS"])


def test_other_users_answer_when_the_answering_ones_are_gone():
    """In each tier of the block: otherwise no session could be asked to give it up."""
    world = new_world(num_slots=2)
    store(world, A, ONES)
    store(world, B, ONES)
    store(world, C, TWOS + THREES)
    policy = world.engine._state.policy
    assert not policy.ranks(B, Tier.DRAM), "nothing of it is in DRAM"
    load(world, A, ONES)
    assert not policy.ranks(B, Tier.DRAM)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert policy.ranks(B, Tier.DRAM)
    assert policy.offers(B)
