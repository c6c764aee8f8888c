"""What is missed because its tokens were discarded elsewhere is named so; nothing else is."""

from kvd.core.state import discarded_blocks
from kvd.core.state.session_history import MoveKind
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from tests.kvd.core.operations.sparse_worlds import EVEN, TOKENS, rest, sparse_world
from tests.kvd.core.operations.sparse_worlds import discard as drop
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    C,
    load,
    new_world,
    prepare_load,
    restarted,
    store,
    store_named,
)
from tests.property.cache_world import CacheWorld, to_bytes

OLD = ONES + TWOS + THREES
KEPT = ONES + THREES


def cut_world(*, ranges=((4, 8),), key=A) -> CacheWorld:
    """A session that has lost its second block, of three."""
    world = new_world()
    store(world, key, OLD)
    drop(world, key, OLD, list(ranges))
    return world


def missed(world: CacheWorld, key, tokens=OLD) -> tuple[int, str]:
    """How much of a sequence there is, and why no more."""
    answer = prepare_load(world, key, tokens)
    if answer.lookup is not Lookup.MISS:
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    return answer.end_token, answer.miss_reason


def last_miss(world: CacheWorld, key) -> tuple[str, int]:
    moves = [m for m in world.engine.inspection.history.of(key) if m.kind is MoveKind.MISSED]
    return (moves[-1].why, moves[-1].num_tokens) if moves else ("", 0)


def test_a_fork_of_the_context_before_is_told_what_became_of_it():
    """It has taken no turn before, so that it shares nothing: `kvd why` knows it all the same."""
    world = cut_world()
    assert missed(world, B) == (4, "discarded")
    assert last_miss(world, B) == ("discarded", 8)


def test_so_is_one_that_finds_nothing():
    """All was dropped, as of a session that is deleted; its own name is told the same."""
    world = cut_world(ranges=[(0, 12)])
    assert missed(world, B) == (0, "discarded")
    assert missed(world, A) == (0, "discarded")
    assert last_miss(world, B) == ("discarded", 12)


def test_so_is_the_session_itself_where_it_goes_back():
    """A turn that had dropped something was cancelled; the next one keeps it."""
    world = new_world()
    store_named(world, A, OLD, WHOLE)
    world.engine.sessions.discard(A, to_bytes(OLD), [(4, 8)], lineage=WHOLE)
    answer = world.engine.loads.prepare(A, to_bytes(OLD), 0, ENGINE_ID, lineage=WHOLE)
    assert (answer.end_token, answer.miss_reason) == (4, "discarded")
    assert last_miss(world, A) == ("discarded", 8)


def test_what_compaction_leaves_of_discarded_tokens():
    """The blocks that had them are gone, though each had something that stays."""
    world = sparse_world()
    assert missed(world, B, TOKENS) == (len(TOKENS), "")
    rest(world)
    world.quiesce()
    assert missed(world, C, TOKENS) == (0, "discarded")


def test_a_fork_that_has_taken_a_turn_keeps_its_blocks():
    """What becomes of them later is another matter."""
    world = new_world()
    store(world, A, OLD)
    store(world, B, OLD)
    drop(world, A, OLD, [(4, 8)])
    assert missed(world, C) == (12, "")
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    assert missed(world, B) == (4, "flushed")
    assert missed(world, C) == (4, "")


def test_what_is_stored_again_is_there_and_goes_for_its_own_reasons():
    world = cut_world()
    store(world, B, OLD)
    assert missed(world, B) == (12, "")
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    assert missed(world, B) == (4, "flushed")


def test_other_tokens_are_no_discarded_ones():
    """Nor those of what the discard has left, which the session has."""
    world = cut_world()
    assert missed(world, B, ONES + [9] * 8) == (4, "")
    assert missed(world, B, [9] * 8) == (0, "unknown_session")
    assert missed(world, A, [*KEPT, 9, 9]) == (8, "not_stored")
    assert load(world, A, KEPT).miss_reason == ""


def test_the_newest_are_remembered(monkeypatch):
    """As long as kvd lives."""
    monkeypatch.setattr(discarded_blocks, "MOST_DISCARDED", 2)
    world = new_world()
    for key in (A, B):
        store(world, key, [*OLD, *ONES] if key is A else [5] * 4)
    drop(world, A, [*OLD, *ONES], [(4, 16)])
    assert len(world.engine._state.discarded) == 2
    monkeypatch.undo()
    restarted(world)
    assert len(world.engine._state.discarded) == 0


def test_nothing_of_an_erased_tenant_is_remembered():
    world = cut_world()
    world.engine.erasing.forget("other")
    assert missed(world, B) == (4, "discarded")
    world.engine.erasing.forget("a")
    assert missed(world, C) == (4, "")


def test_what_is_only_dropped_in_part_is_still_there():
    """Each of its blocks has something of the session: a fork finds all of them."""
    world = new_world()
    store(world, A, TOKENS)
    drop(world, A, TOKENS, EVEN)
    assert missed(world, B, TOKENS) == (len(TOKENS), "")
