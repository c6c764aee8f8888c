"""Discards: metadata only, and never a wrong match afterwards."""

import dataclasses

import pytest

from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import LruPolicy
from kvd.core.records.actions import SESSION_DISCARDED, Emit, HashSlots, WriteBlock
from kvd.core.records.errors import InvalidRequestError
from kvd.core.state.limits import Limits
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
    load,
    new_world,
    prepare_load,
    prepare_store,
    spans_of_a,
    store,
    store_named,
)
from tests.property.cache_world import LAYOUT, CacheWorld, compute, salt_of, to_bytes

FOURS = [4] * 4


def discard(world, tokens, *ranges) -> int:
    kept = world.engine.sessions.discard(A, to_bytes(tokens), ranges)
    world.pump()
    return kept


def test_the_oldest_tokens_go_and_the_rest_moves_to_the_front():
    """What remains is found at its new positions, inside the old blocks."""
    world = new_world()
    store(world, A, ONES + TWOS + THREES)
    assert discard(world, ONES + TWOS + THREES, (0, 6)) == 6
    assert (counter(world, "discards"), counter(world, "discarded_tokens")) == (1, 6)
    answer = load(world, A, [2, 2, *THREES])
    assert [(s.start, s.num_tokens, s.token_offset) for s in answer.spans] == [(2, 2, 0), (0, 4, 2)]
    assert world.engine.inspection.info(A).num_blocks == 2


@pytest.mark.parametrize("is_named", [False, True])
def test_other_tokens_do_not_match_the_rest_of_a_discard(is_named):
    """A span that lost tokens has no block key any more: only its tokens identify it."""
    world = new_world()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    lineage = WHOLE.after(to_bytes(tokens), [(0, 2)]) if is_named else None
    store(world, A, tokens)
    world.engine.sessions.discard(
        A, to_bytes(tokens), [(0, 2)], lineage=WHOLE if is_named else None
    )
    world.pump()
    for asked, num_found in (([3, 9, 5, 6, 7, 8], 0), ([3, 4, 5, 6, 7, 9], 2), (tokens[2:], 6)):
        answer = world.engine.loads.prepare(A, to_bytes(asked), 0, ENGINE_ID, lineage=lineage)
        assert answer.end_token == num_found
        if answer.lease_id:
            world.engine.loads.complete(answer.lease_id, ENGINE_ID)
        world.pump()


def test_ranges_are_sorted_and_joined():
    """A block may lose several runs of tokens, and then be used by several spans."""
    world = new_world()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    store(world, A, tokens)
    assert discard(world, tokens, (6, 7), (1, 2), (2, 3)) == 5
    answer = load(world, A, [1, 4, 5, 6, 8])
    assert [(s.start, s.num_tokens) for s in answer.spans] == [(0, 1), (3, 1), (0, 2), (3, 1)]


def test_an_empty_discard_changes_nothing():
    """No ranges, or ranges behind the stored tokens."""
    world = new_world()
    store(world, A, ONES)
    assert discard(world, ONES) == 4
    assert discard(world, ONES + TWOS, (4, 8)) == 4
    assert world.engine.inspection.describe(A).info.num_blocks == 1


def test_discarding_everything_drops_the_session():
    """A session without spans does not exist."""
    world = new_world()
    store(world, A, ONES)
    assert discard(world, ONES, (0, 4)) == 0
    assert world.engine.inspection.info(A) is None


def test_blocks_computed_after_a_discard_are_not_shared():
    """The same tokens after a discard and without one are different computations."""
    world = new_world()
    store(world, A, ONES + TWOS)
    discard(world, ONES + TWOS, (0, 2))
    store(world, A, [1, 1, *TWOS, *THREES])
    assert load(world, B, ONES + TWOS + THREES).end_token == 8
    assert load(world, B, [1, 1, *TWOS, *THREES]).end_token == 0


def test_the_rest_of_a_discard_is_shorter_than_what_another_session_has_computed():
    """Both are of one lineage; the blocks that were computed after the discard go on."""
    world = new_world()
    tokens = ONES + TWOS + THREES
    lineage = WHOLE.after(to_bytes(tokens), [(0, 4)])
    store(world, A, tokens)
    world.engine.sessions.discard(A, to_bytes(tokens), [(0, 4)], lineage=WHOLE)
    world.pump()
    store_named(world, B, TWOS + THREES + FOURS, lineage)
    asked = to_bytes(TWOS + THREES + FOURS)
    answer = world.engine.loads.prepare(A, asked, 0, ENGINE_ID, lineage=lineage)
    assert answer.end_token == len(TWOS + THREES + FOURS)


def test_a_partial_block_from_before_a_discard_is_not_replaced():
    """Its tokens were computed before the discard; a new block would say otherwise."""
    world = new_world()
    store(world, A, [*ONES, 2])
    discard(world, [*ONES, 2], (0, 2))
    answer = prepare_store(world, A, [1, 1, 2, 3], from_token=0)
    assert [(b.token_offset, b.num_tokens) for b in answer.blocks] == [(3, 1)]


def test_two_spans_of_one_block_have_different_successors():
    """Blocks behind the first run of a block do not follow the second one."""
    world = new_world()
    store(world, A, [1, 2, 3, 4])
    discard(world, [1, 2, 3, 4], (1, 2))
    chains = [span.chain for span in spans_of_a(world)]
    assert len(set(chains)) == 2


def test_a_session_with_a_discard_has_its_own_chain():
    """A longer content chain of equal tokens is not used: its KV is another computation."""
    world = new_world()
    store(world, B, ONES + TWOS)
    store(world, A, [1, 1, 1, 1, 1, 2])
    discard(world, [1, 1, 1, 1, 1, 2], (0, 1))
    assert load(world, B, ONES + TWOS).end_token == 8
    assert load(world, A, ONES + TWOS).end_token == 5


def test_coupled_positions_keep_the_prefix_only():
    """Where keys depend on positions nothing behind the first discarded token is valid."""
    world = new_world()
    layout = dataclasses.replace(LAYOUT, position_mode="coupled")
    world.engine = CacheEngine(layout, world.limits, salt_of)
    store(world, A, ONES + TWOS)
    assert discard(world, ONES + TWOS, (5, 6)) == 5


def test_a_truncated_session_never_shares_later_blocks_with_an_untruncated_one():
    """The same tokens remain, the same ones follow; whichever is first, they share nothing."""
    for truncated_first in (True, False):
        world = new_world()
        kept = [*ONES, *TWOS]
        later = [*kept, *THREES, 5]
        store(world, A, [7, 7, 7, 7, *kept])
        discard(world, [7, 7, 7, 7, *kept], (0, 4))
        for key in (A, B) if truncated_first else (B, A):
            store(world, key, later)
        assert not set(keys_of(world, A)) & set(keys_of(world, B))
        for key in (A, B):
            assert load(world, key, later).end_token == len(later)


def test_tokens_that_kvd_has_lost_are_discarded_too():
    """The engine has kept rows that kvd has lost, and stores them after the discard.

    By the tokens alone they look like those of a session without a discard.
    """
    tokens = [*ONES, *TWOS, *THREES]
    kept = [*ONES, *THREES]
    for is_stored in (False, True):
        world = new_world()
        if is_stored:
            store(world, A, ONES)
        assert discard(world, tokens, (4, 8)) == (4 if is_stored else 0)
        store_named(world, A, kept, WHOLE.after(to_bytes(tokens), [(4, 8)]))
        store(world, B, kept)
        assert keys_of(world, A)[0] == keys_of(world, B)[0], "before the discard all is as it was"
        assert keys_of(world, A)[1] != keys_of(world, B)[1]


def test_a_discard_that_kvd_has_missed_shows_in_the_lineage():
    """Equal tokens in the old place are another computation: they are not granted."""
    world = new_world()
    tokens = [*ONES, *TWOS, *TWOS]
    store(world, A, tokens)
    lineage = WHOLE.after(to_bytes(tokens), [(4, 8)])
    kept = to_bytes([*ONES, *TWOS])
    answer = world.engine.loads.prepare(A, kept, 0, ENGINE_ID, lineage=lineage)
    assert answer.end_token == 4
    assert load(world, A, [*ONES, *TWOS]).end_token == 8, "who does not say is not to know"


def test_a_block_ends_where_the_first_discard_was():
    """Otherwise it would mix two computations."""
    world = new_world()
    tokens = [*ONES, 2, 2, 9, 9, *THREES]
    lineage = WHOLE.after(to_bytes(tokens), [(6, 8)])
    kept = [*ONES, 2, 2, *THREES]
    store_named(world, A, kept, lineage)
    blocks = world.engine.inspection.describe(A).blocks
    assert [block.num_tokens for block in blocks] == [4, 2, 4]
    answer = world.engine.loads.prepare(B, to_bytes(kept), 0, ENGINE_ID, lineage=lineage)
    assert answer.end_token == len(kept), "a fork with the same discards finds all of it"


def test_dropping_the_end_is_no_real_discard():
    """The rest is a prefix like any other, and so are later blocks."""
    world = new_world()
    store(world, A, ONES + TWOS)
    assert discard(world, ONES + TWOS, (4, 8)) == 4
    store(world, A, ONES + THREES)
    store(world, B, ONES + THREES)
    assert keys_of(world, A) == keys_of(world, B)
    assert WHOLE.after(to_bytes(ONES + TWOS), [(4, 8)]) == WHOLE


def test_discards_accumulate():
    """Each applies to the result of the one before it, also at the same place."""
    world = new_world()
    tokens, lineage = list(range(40, 60)), WHOLE
    store(world, A, tokens)
    for ranges in ([(9, 11)], [(1, 2), (5, 12)], [(0, 3)], [(2, 3), (4, 6)]):
        world.engine.sessions.discard(A, to_bytes(tokens), ranges, lineage=lineage)
        world.pump()
        lineage = lineage.after(to_bytes(tokens), ranges)
        for start, end in reversed(ranges):
            del tokens[start:end]
        answer = world.engine.loads.prepare(A, to_bytes(tokens), 0, ENGINE_ID, lineage=lineage)
        assert answer.end_token == len(tokens)
        rows = [r for s in answer.spans for r in world.slots[s.slot_id][s.start :][: s.num_tokens]]
        first = compute([], list(range(40, 60)))
        assert rows == [first[token - 40] for token in tokens]
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)


def test_a_discard_survives_a_restart():
    """From the index, and for blocks in DRAM only."""
    for keep_dram in (False, True):
        world = new_world(num_extents=0 if keep_dram else 64)
        store(world, A, ONES + TWOS + THREES)
        discard(world, ONES + TWOS + THREES, (1, 3), (6, 10))
        world.quiesce()
        world.start(keep_dram=keep_dram)
        assert load(world, A, [1, 1, 2, 2, 3, 3]).end_token == 6


def test_a_packed_session_is_unpacked_for_a_discard():
    """Sessions on SSD only are edited like the others."""
    world = new_world()
    store(world, A, ONES + TWOS)
    world.engine.release_dram()
    world.pump()
    assert world.engine.inspection.describe(A).info.dram_bytes == 0
    assert discard(world, ONES + TWOS, (0, 2)) == 6
    world.quiesce()
    assert load(world, A, [1, 1, *TWOS]).end_token == 6


def test_an_active_load_keeps_its_blocks():
    """They are dropped when it ends; until then its rows are the promised ones."""
    world = new_world()
    store(world, A, ONES + TWOS)
    answer = prepare_load(world, A, ONES + TWOS)
    discard(world, ONES + TWOS, (0, 4))
    world.quiesce()
    rows = [row for span in answer.spans for row in world.slots[span.slot_id]]
    assert rows == compute([], ONES + TWOS)
    world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    world.quiesce()
    assert world.engine.inspection.stats().tiers[0].num_blocks == 1


def test_an_active_store_does_not_bring_back_discarded_tokens():
    """It was prepared for a sequence that the session does not have any more."""
    world = new_world()
    store(world, A, ONES + TWOS)
    answer = prepare_store(world, A, ONES + TWOS + THREES)
    discard(world, ONES + TWOS, (0, 4))
    assert complete_store(world, answer) == 4
    world.quiesce()
    assert load(world, A, TWOS).end_token == 4
    assert world.engine.inspection.stats().tiers[0].num_blocks == 1


def test_blocks_with_active_operations_are_discarded_when_these_end():
    """Hashes, writes and reads end as usual; then unused blocks are dropped."""
    for kind in (HashSlots, WriteBlock):
        world = new_world()
        answer = prepare_store(world, A, ONES + TWOS)
        complete_store(world, answer)
        if kind is WriteBlock:
            world.finish_all(HashSlots)
        assert world.io_of(kind)
        discard(world, ONES + TWOS, (0, 4))
        world.quiesce()
        assert [tier.num_blocks for tier in world.engine.inspection.stats().tiers] == [1, 1]


def test_shared_blocks_stay_whole_for_the_others():
    """Another session on the same blocks is not affected."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, B, ONES + TWOS)
    before = world.engine.inspection.describe(B).blocks
    discard(world, ONES + TWOS, (0, 1), (2, 3), (5, 8))
    assert world.engine.inspection.describe(B).blocks == before
    assert load(world, B, ONES + TWOS).end_token == 8


def test_naive_positions_keep_what_decoupled_ones_keep():
    """They exist for comparison: rows stay, with the positions they were computed at."""
    world = new_world()
    layout = dataclasses.replace(LAYOUT, position_mode="naive")
    world.engine = CacheEngine(layout, world.limits, salt_of)
    store(world, A, ONES + TWOS)
    assert discard(world, ONES + TWOS, (1, 6)) == 3
    assert load(world, A, [1, 2, 2]).end_token == 3


def test_with_coupled_positions_the_prefix_is_ordinary():
    """Later tokens are computed anew, and may be shared."""
    world = new_world()
    layout = dataclasses.replace(LAYOUT, position_mode="coupled")
    world.engine = CacheEngine(layout, world.limits, salt_of)
    store(world, A, ONES + TWOS)
    lineage = WHOLE.after(to_bytes(ONES + TWOS), [(4, 6)])
    assert discard(world, ONES + TWOS, (4, 6)) == 4
    store_named(world, A, [*ONES, 2, 2], lineage)
    store(world, B, [*ONES, 2, 2])
    assert keys_of(world, A) == keys_of(world, B)


def test_impossible_ranges_are_refused():
    """Empty, reversed or outside the tokens."""
    world = new_world()
    for bad in ((2, 2), (3, 1), (0, 5), (-1, 2)):
        with pytest.raises(InvalidRequestError, match="range"):
            discard(world, ONES, bad)


def test_discards_are_counted_and_reported():
    """With the number of dropped tokens, and the rest of the session."""
    world = new_world()
    store(world, A, ONES + TWOS)
    discard(world, ONES + TWOS, (1, 3), (5, 6))
    assert (counter(world, "discards"), counter(world, "discarded_tokens")) == (1, 3)
    fields = {"num_dropped": "3", "num_tokens": "5", "num_spans": "4"}
    assert world.events[-1] == Emit(SESSION_DISCARDED, A, fields)
    discard(world, [1, 1, 2, 2, 2], (0, 5))
    assert (counter(world, "discards"), counter(world, "discarded_tokens")) == (2, 8)


def test_a_discard_reports_the_new_size():
    """Policies that rank by size, or learn from it, need it."""
    sizes = []

    class Sized(LruPolicy):
        def on_resize(self, key, num_tokens):
            sizes.append((key, num_tokens))

    world = CacheWorld(Limits(16, 64), Sized)
    store(world, A, ONES + TWOS)
    sizes.clear()
    discard(world, ONES + TWOS, (1, 3))
    assert sizes == [(A, 6)]
