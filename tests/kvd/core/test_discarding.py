"""Discards: metadata only, and never a wrong match afterwards."""

import dataclasses

import pytest

from kvd.core.engine import CacheEngine
from kvd.core.errors import InvalidRequestError
from kvd.core.packing import unpack_spans
from tests.kvd.core.turns import (
    ONES,
    THREES,
    TWOS,
    A,
    B,
    load,
    new_world,
    prepare_store,
    store,
)
from tests.property.cache_world import LAYOUT, salt_of, to_bytes


def discard(world, tokens, *ranges) -> int:
    kept = world.engine.discard(A, to_bytes(tokens), ranges, world.now_ns)
    world.pump()
    return kept


def test_the_oldest_tokens_go_and_the_rest_moves_up():
    """What remains is found at its new positions, inside the old blocks."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES)
    assert discard(world, ONES + TWOS + THREES, (0, 6)) == 6
    answer = load(world, A, [2, 2, *THREES])
    assert [(s.start, s.num_tokens, s.token_offset) for s in answer.spans] == [(2, 2, 0), (0, 4, 2)]
    assert world.engine.session_info(A).num_blocks == 2


def test_ranges_are_sorted_and_joined():
    """A block may lose several runs of tokens, and then be used by several spans."""
    world = new_world()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    store(world, A, tokens)
    assert discard(world, tokens, (6, 7), (1, 2), (2, 3)) == 5
    answer = load(world, A, [1, 4, 5, 6, 8])
    assert [(s.start, s.num_tokens) for s in answer.spans] == [(0, 1), (3, 1), (0, 2), (3, 1)]


def test_nothing_to_discard_changes_nothing():
    """No ranges, or ranges behind what is stored."""
    world = new_world()
    store(world, A, ONES)
    assert discard(world, ONES) == 4
    assert discard(world, ONES + TWOS, (4, 8)) == 4
    assert world.engine.describe(A).info.num_blocks == 1


def test_discarding_everything_drops_the_session():
    """A session without spans is none."""
    world = new_world()
    store(world, A, ONES)
    assert discard(world, ONES, (0, 4)) == 0
    assert world.engine.session_info(A) is None


def test_blocks_computed_after_a_discard_are_not_shared():
    """The same tokens after a discard and without one are different computations."""
    world = new_world()
    store(world, A, ONES + TWOS)
    discard(world, ONES + TWOS, (0, 2))
    store(world, A, [1, 1, *TWOS, *THREES])
    assert load(world, B, ONES + TWOS + THREES).end_token == 8
    assert load(world, B, [1, 1, *TWOS, *THREES]).end_token == 0


def test_a_partial_block_from_before_a_discard_is_not_replaced():
    """Its tokens were computed before the discard; a new block would claim otherwise."""
    world = new_world()
    store(world, A, [*ONES, 2])
    discard(world, [*ONES, 2], (0, 2))
    answer = prepare_store(world, A, [1, 1, 2, 3], from_token=0)
    assert [(b.token_offset, b.num_tokens) for b in answer.blocks] == [(3, 1)]


def test_two_spans_of_one_block_have_different_successors():
    """What follows the first run of a block is not what follows the second one."""
    world = new_world()
    store(world, A, [1, 2, 3, 4])
    discard(world, [1, 2, 3, 4], (1, 2))
    chains = [span.chain for span in _spans(world)]
    assert len(set(chains)) == 2


def test_a_session_with_a_discard_goes_its_own_way():
    """A longer content chain of equal tokens is not used: its KV is another computation."""
    world = new_world()
    store(world, B, ONES + TWOS)
    store(world, A, [1, 1, 1, 1, 1, 2])
    discard(world, [1, 1, 1, 1, 1, 2], (0, 1))
    assert load(world, B, ONES + TWOS).end_token == 8
    assert load(world, A, ONES + TWOS).end_token == 5


def test_coupled_positions_keep_the_prefix_only():
    """With positions baked into the keys nothing behind the first discarded token is valid."""
    world = new_world()
    layout = dataclasses.replace(LAYOUT, position_mode="coupled")
    world.engine = CacheEngine(layout, world.limits, salt_of)
    store(world, A, ONES + TWOS)
    assert discard(world, ONES + TWOS, (5, 6)) == 5


def test_impossible_ranges_are_refused():
    """Empty, reversed or outside the tokens."""
    world = new_world()
    for bad in ((2, 2), (3, 1), (0, 5), (-1, 2)):
        with pytest.raises(InvalidRequestError, match="range"):
            discard(world, ONES, bad)


def _spans(world):
    world.commit(len(world.index.uncommitted))
    return unpack_spans(world.index.sessions[A].spans)
