"""Misses of tokens that were discarded elsewhere are named so; no other misses are."""

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
    restart_committed,
    store,
    store_named,
)
from tests.property.cache_world import CacheWorld, to_bytes

OLD = ONES + TWOS + THREES
KEPT = ONES + THREES


def cut_world(*, ranges=((4, 8),), key=A) -> CacheWorld:
    """Make a session that has lost its second block, of three."""
    world = new_world()
    store(world, key, OLD)
    drop(world, key, OLD, list(ranges))
    return world


def find_miss(world: CacheWorld, key, tokens=OLD) -> tuple[int, str]:
    """Return how many tokens of a sequence are found, and the reason of the miss."""
    answer = prepare_load(world, key, tokens)
    if answer.lookup is not Lookup.MISS:
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    return answer.end_token, answer.miss_reason


def last_miss(world: CacheWorld, key) -> tuple[str, int]:
    moves = [m for m in world.engine.inspection.history.of(key) if m.kind is MoveKind.MISSED]
    return (moves[-1].why, moves[-1].num_tokens) if moves else ("", 0)


def test_a_fork_from_before_a_discard_learns_the_reason():
    """It has run no turn yet, so that it shares nothing: still `kvd why` knows the reason."""
    world = cut_world()
    assert find_miss(world, B) == (4, "discarded")
    assert last_miss(world, B) == ("discarded", 8)


def test_a_fork_that_finds_nothing_learns_it_too():
    """All tokens were dropped, as of a deleted session; the session's own loads learn the same."""
    world = cut_world(ranges=[(0, 12)])
    assert find_miss(world, B) == (0, "discarded")
    assert find_miss(world, A) == (0, "discarded")
    assert last_miss(world, B) == ("discarded", 12)


def test_a_session_that_goes_back_learns_it_too():
    """A turn that had dropped tokens was cancelled; the next one keeps them."""
    world = new_world()
    store_named(world, A, OLD, WHOLE)
    world.engine.sessions.discard(A, to_bytes(OLD), [(4, 8)], lineage=WHOLE)
    answer = world.engine.loads.prepare(A, to_bytes(OLD), 0, ENGINE_ID, lineage=WHOLE)
    assert (answer.end_token, answer.miss_reason) == (4, "discarded")
    assert last_miss(world, A) == ("discarded", 8)


def test_discarded_tokens_are_known_after_compaction():
    """The blocks that had them are gone, though some of their tokens stay."""
    world = sparse_world()
    assert find_miss(world, B, TOKENS) == (len(TOKENS), "")
    rest(world)
    world.quiesce()
    assert find_miss(world, C, TOKENS) == (0, "discarded")


def test_a_fork_that_has_run_a_turn_keeps_its_blocks():
    """Later losses have their own reasons."""
    world = new_world()
    store(world, A, OLD)
    store(world, B, OLD)
    drop(world, A, OLD, [(4, 8)])
    assert find_miss(world, C) == (12, "")
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    assert find_miss(world, B) == (4, "flushed")
    assert find_miss(world, C) == (4, "")


def test_tokens_stored_again_have_their_own_reasons():
    world = cut_world()
    store(world, B, OLD)
    assert find_miss(world, B) == (12, "")
    world.engine.sessions.flush(B, dry_run=False)
    world.pump()
    assert find_miss(world, B) == (4, "flushed")


def test_other_tokens_are_not_called_discarded():
    """Nor are those that the discard has left, which the session has."""
    world = cut_world()
    assert find_miss(world, B, ONES + [9] * 8) == (4, "")
    assert find_miss(world, B, [9] * 8) == (0, "unknown_session")
    assert find_miss(world, A, [*KEPT, 9, 9]) == (8, "not_stored")
    assert load(world, A, KEPT).miss_reason == ""


def test_the_newest_discards_are_remembered(monkeypatch):
    """As long as kvd runs."""
    monkeypatch.setattr(discarded_blocks, "MOST_DISCARDED", 2)
    world = new_world()
    for key in (A, B):
        store(world, key, [*OLD, *ONES] if key is A else [5] * 4)
    drop(world, A, [*OLD, *ONES], [(4, 16)])
    assert len(world.engine._state.discarded) == 2
    monkeypatch.undo()
    restart_committed(world)
    assert len(world.engine._state.discarded) == 0


def test_an_erased_tenants_discards_are_forgotten():
    world = cut_world()
    world.engine.erasing.forget("other")
    assert find_miss(world, B) == (4, "discarded")
    world.engine.erasing.forget("a")
    assert find_miss(world, C) == (4, "")


def test_partly_dropped_blocks_are_still_found():
    """Each block has some tokens of the session: a fork finds all of them."""
    world = new_world()
    store(world, A, TOKENS)
    drop(world, A, TOKENS, EVEN)
    assert find_miss(world, B, TOKENS) == (len(TOKENS), "")
