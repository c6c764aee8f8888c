"""Discards of engines that name the lineage of their tokens."""

import dataclasses

import pytest

from kvd.core.engine import CacheEngine
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    complete_store,
    counter,
    keys_of,
    new_world,
    spans_of_a,
    store,
    store_named,
)
from tests.property.cache_world import LAYOUT, salt_of, to_bytes

FOURS = [4] * 4

OLD = [*ONES, *TWOS, *THREES, *FOURS]
CUT = [(4, 8)]
KEPT = [*ONES, *THREES, *FOURS]
AFTER = WHOLE.after(to_bytes(OLD), CUT)


def test_a_load_of_a_whole_context_gets_nothing_else():
    """WHOLE is a lineage; only a load that names none gets what is stored."""
    for discarded_as in (WHOLE, None):
        world = new_world()
        store(world, A, OLD)
        _discard_named(world, OLD, CUT, discarded_as)
        assert _num_found(world, KEPT, WHOLE) == 4
        assert _num_found(world, KEPT, None) == _num_found(world, KEPT, AFTER) == 12


def test_rows_before_all_discards_are_found_as_whole():
    """When the last discarded token's successors are dropped, too, the rest is whole again."""
    world = new_world()
    store(world, A, [1, 2, 3, 4])
    _discard_named(world, [1, 2, 3, 4], [(2, 3)], WHOLE)
    _discard_named(world, [1, 2, 4], [(2, 3)], WHOLE.after(to_bytes([1, 2, 3, 4]), [(2, 3)]))
    assert _num_found(world, [1, 2, 9], WHOLE) == 2, "as if nothing had been discarded"


def test_blocks_stored_as_whole_are_not_chained_to_a_discard():
    """A new context of the same tokens builds on the clean blocks, and replaces the others."""
    world = new_world()
    store(world, A, OLD)
    _discard_named(world, OLD, CUT, WHOLE)
    store_named(world, A, [*KEPT, 9], WHOLE)
    store(world, B, [*KEPT, 9])
    assert keys_of(world, A) == keys_of(world, B)
    assert _num_found(world, KEPT, AFTER) == 4


@pytest.mark.parametrize("restarts", [False, True])
def test_a_discard_may_be_repeated(restarts):
    """A turn that overflowed was cancelled; its retry drops the same tokens."""
    world = new_world()
    store_named(world, A, OLD, WHOLE)
    assert _discard_named(world, OLD, CUT, WHOLE) == 12
    store_named(world, A, [*KEPT, 5, 6], AFTER)
    spans, num_discards = spans_of_a(world), counter(world, "discards")
    if restarts:
        world.quiesce()
        world.start(keep_dram=False)
        num_discards = 0
    assert _discard_named(world, OLD, CUT, WHOLE) == 12, "of what the discard leaves"
    assert counter(world, "discards") == num_discards
    assert world.engine.inspection.info(A).num_tokens == 14
    assert [span.chain for span in spans_of_a(world)] == [span.chain for span in spans]
    assert _num_found(world, [*KEPT, 5, 6], AFTER) == 14


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("first", [0, 4, 6])
def test_a_late_discard_does_not_change_later_tokens(first, restarts):
    """The tokens it meant are gone; the present ones were computed differently."""
    world = new_world()
    ranges = [(first, first + 3)]
    store_named(world, A, OLD, WHOLE)
    _discard_named(world, OLD, ranges, WHOLE)
    after, kept = WHOLE.after(to_bytes(OLD), ranges), OLD[:first] + OLD[first + 3 :]
    _discard_named(world, kept, [(1, 2)], after)
    last, left = after.after(to_bytes(kept), [(1, 2)]), kept[:1] + kept[2:]
    if restarts:
        world.quiesce()
        world.start(keep_dram=True)
    for _ in range(2):
        _discard_named(world, OLD, ranges, WHOLE)
        _discard_named(world, kept, [(1, 2)], after)
        assert _num_found(world, left, last) == len(left)


def test_a_turn_that_goes_back_to_the_old_context_replaces_the_session():
    """The turn of the discard failed for good: the next one computes the old context anew."""
    world = new_world()
    store_named(world, A, OLD, WHOLE)
    _discard_named(world, OLD, CUT, WHOLE)
    assert _num_found(world, OLD, WHOLE) == 4
    store_named(world, A, [*OLD, 5], WHOLE)
    assert world.engine.inspection.info(A).num_tokens == 17
    assert _num_found(world, [*OLD, 5], WHOLE) == 17
    assert _num_found(world, KEPT, AFTER) == 4
    assert world.engine.inspection.stats().tiers[0].num_blocks == 5, (
        "of the truncated one nothing is left"
    )
    assert _discard_named(world, [*OLD, 5], CUT, WHOLE) == 13, "and it can be truncated in turn"
    assert _num_found(world, [*KEPT, 5], WHOLE.after(to_bytes([*OLD, 5]), CUT)) == 13


def test_a_repeated_discard_drops_a_store_of_the_old_context():
    """A store of the new context stays."""
    for lineage, tokens, num_left in ((WHOLE, [*OLD, 5], 12), (AFTER, [*KEPT, 5], 13)):
        world = new_world()
        store_named(world, A, OLD, WHOLE)
        _discard_named(world, OLD, CUT, WHOLE)
        answer = world.engine.stores.prepare(A, to_bytes(tokens), 0, ENGINE_ID, lineage=lineage)
        _discard_named(world, OLD, CUT, WHOLE)
        complete_store(world, answer)
        world.quiesce()
        assert world.engine.inspection.info(A).num_tokens == num_left
        assert _num_found(world, KEPT, AFTER) == 12


def test_a_session_longer_than_the_context_is_cut_to_it():
    """A failed turn has stored more than its context has now; that is dropped, too."""
    world = new_world()
    store_named(world, A, [*OLD, *ONES], WHOLE)
    assert _discard_named(world, OLD, CUT, WHOLE) == 12
    assert world.engine.inspection.info(A).num_tokens == 12


def test_dropping_the_end_again_keeps_later_tokens():
    """The resulting lineage is the one that it starts from."""
    world = new_world()
    store_named(world, A, OLD, WHOLE)
    for _ in range(2):
        assert _discard_named(world, OLD, [(4, 16)], WHOLE) == 4
        store_named(world, A, KEPT, WHOLE)
        assert _num_found(world, KEPT, WHOLE) == 12


def test_coupled_sessions_are_not_changed_either():
    """By their tokens alone they might look like those before the discard."""
    world = new_world()
    layout = dataclasses.replace(LAYOUT, position_mode="coupled")
    world.engine = CacheEngine(layout, world.limits, salt_of)
    old = [1] * 16
    store_named(world, A, old, WHOLE)
    assert _discard_named(world, old, CUT, WHOLE) == 4
    after = WHOLE.after(to_bytes(old), CUT)
    store_named(world, A, old[4:], after)
    assert _discard_named(world, old, CUT, WHOLE) == 12
    assert world.engine.inspection.info(A).num_tokens == 12


def test_a_coupled_session_of_later_discards_is_not_changed():
    """Tokens behind the first dropped one were computed after another context."""
    world = new_world()
    layout = dataclasses.replace(LAYOUT, position_mode="coupled")
    world.engine = CacheEngine(layout, world.limits, salt_of)
    old = [1] * 16
    store_named(world, A, old, WHOLE)
    _discard_named(world, old, CUT, WHOLE)
    after = WHOLE.after(to_bytes(old), CUT)
    _discard_named(world, old[4:], CUT, after)
    store_named(world, A, old[8:], after.after(to_bytes(old[4:]), CUT))
    assert _discard_named(world, old, CUT, WHOLE) == 8
    assert world.engine.inspection.info(A).num_tokens == 8


def _discard_named(world, tokens, ranges, lineage) -> int:
    kept = world.engine.sessions.discard(A, to_bytes(tokens), ranges, lineage=lineage)
    world.pump()
    return kept


def _num_found(world, tokens, lineage) -> int:
    """Return how many tokens a load is granted that names this lineage."""
    answer = world.engine.loads.prepare(A, to_bytes(tokens), 0, ENGINE_ID, lineage=lineage)
    world.pump()
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    if answer.lookup is Lookup.HIT:
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    return answer.end_token
