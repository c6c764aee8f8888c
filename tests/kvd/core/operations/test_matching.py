"""How many tokens of a sequence are stored: in a session's own spans, or along the chain."""

import pytest

from kvd.core.operations.chaining import Chaining
from kvd.core.operations.matching import (
    check_from_token,
    kept_pieces,
    match_tokens,
    num_tokens_of,
    plan_blocks,
)
from kvd.core.records.errors import InvalidRequestError
from shared.types.lineage import WHOLE
from tests.kvd.core.turns import ONES, THREES, TWOS, A, B, C, new_world, store
from tests.property.cache_world import LAYOUT, salt_of, to_bytes

OTHERS = [9] * 4


def match(world, key, tokens, lineage=None):
    state = world.engine._state
    chaining = Chaining(LAYOUT, salt_of(key.tenant), lineage)
    return match_tokens(state, key, to_bytes(tokens), chaining), chaining


def ends(pieces):
    return [piece.end for piece in pieces]


def test_a_session_matches_up_to_the_first_different_token():
    """The differing span gives the reason for the end."""
    world = new_world()
    store(world, A, ONES + TWOS)
    found, _ = match(world, A, ONES + TWOS + THREES)
    assert (ends(found.pieces), found.miss_reason) == ([4, 8], "not_stored")
    found, _ = match(world, A, ONES + THREES)
    assert (ends(found.pieces), found.miss_reason) == ([4], "tokens_differ")


def test_another_session_s_equal_prefix_is_found_along_the_chain():
    """Of the same tenant only: blocks are identified by content."""
    world = new_world()
    store(world, A, ONES + TWOS)
    found, _ = match(world, B, ONES + TWOS + THREES)
    assert ends(found.pieces) == [4, 8]
    assert found.miss_reason == "unknown_session"


def test_the_longer_of_both_matches_wins():
    """A session's own beginning, or another's."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES)
    store(world, B, ONES + OTHERS)
    found, _ = match(world, B, ONES + TWOS + THREES)
    assert ends(found.pieces) == [4, 8, 12]
    session = world.engine._state.sessions[B]
    assert match(world, B, ONES + OTHERS)[0].covers(session, session.spans)
    assert not match(world, B, ONES)[0].covers(session, session.spans)


def test_a_session_with_a_discard_shares_nothing_unless_its_lineage_is_named():
    """Equal tokens are another computation after a discard."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES)
    store(world, C, TWOS + THREES)
    world.engine.sessions.discard(A, to_bytes(ONES + TWOS + THREES), [(0, 4)])
    world.quiesce()
    found, _ = match(world, A, TWOS + THREES)
    assert {piece.span.chain == piece.span.block_key for piece in found.pieces} == {False}
    found, _ = match(world, A, TWOS + THREES, WHOLE)
    assert ends(found.pieces) == [4, 8]
    assert all(piece.span.chain == piece.span.block_key for piece in found.pieces), "those of C"


def test_a_partial_block_at_the_end_is_stored_again_if_its_tokens_are_sent():
    """It is kept where the sequence ends with it, or where its tokens are not sent again."""
    world = new_world()
    store(world, A, [*ONES, 2, 2])
    found, chaining = match(world, A, [*ONES, 2, 2, 2, 2])
    assert ends(found.pieces) == [4, 6]
    assert ends(kept_pieces(world.engine._state, found.pieces, 0, 8, chaining)) == [4]
    assert ends(kept_pieces(world.engine._state, found.pieces, 5, 8, chaining)) == [4, 6]
    assert ends(kept_pieces(world.engine._state, found.pieces, 0, 6, chaining)) == [4, 6]
    assert kept_pieces(world.engine._state, [], 0, 8, chaining) == []


def test_the_rest_is_planned_in_blocks_some_of_which_exist():
    """The last one has the remaining tokens; a block of another session is shared."""
    world = new_world()
    store(world, A, ONES + TWOS)
    tokens = to_bytes([*ONES, *TWOS, 3, 3])
    _, chaining = match(world, B, [])
    planned = plan_blocks(world.engine._state, chaining, tokens, [])
    assert [(block.token_offset, block.span.num_tokens) for block in planned] == [
        (0, 4),
        (4, 4),
        (8, 2),
    ]
    assert [block.block is not None for block in planned] == [True, True, False]
    assert b"".join(block.token_ids for block in planned) == tokens
    found, _ = match(world, B, ONES)
    rest = plan_blocks(world.engine._state, chaining, tokens, found.pieces)
    assert [block.span for block in rest] == [block.span for block in planned[1:]]


@pytest.mark.parametrize("num_bytes", [1, 3, 5])
def test_tokens_are_whole_numbers(num_bytes):
    """They have four bytes each."""
    assert num_tokens_of(bytes(8)) == 2
    with pytest.raises(InvalidRequestError, match=f"{num_bytes} bytes"):
        num_tokens_of(bytes(num_bytes))


@pytest.mark.parametrize("from_token", [-1, 9])
def test_from_token_lies_within_the_tokens_or_at_their_end(from_token):
    """All tokens are sent from the first one on."""
    check_from_token(0, 8)
    check_from_token(8, 8)
    with pytest.raises(InvalidRequestError, match="outside"):
        check_from_token(from_token, 8)
