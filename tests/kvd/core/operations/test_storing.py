"""Stores: which slots they get, what becomes visible, what is shared, what is refused."""

import pytest

from kvd.core.operations.storing import MEAN_SHARE
from kvd.core.records.actions import IoOutcome, SpaceFreed
from kvd.core.records.entries import Pin
from kvd.core.records.errors import InvalidRequestError, LeaseLostError, TooManyLeasesError
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
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
    new_world,
    prepare_store,
    store,
)
from tests.property.cache_world import to_bytes


def test_blocks_become_visible_at_completion():
    """Before complete_store no load finds the blocks; after it they are a hit."""
    world = new_world()
    answer = prepare_store(world, A, ONES + TWOS)
    assert [(b.token_offset, b.num_tokens) for b in answer.blocks] == [(0, 4), (4, 4)]
    assert load(world, A, ONES + TWOS).miss_reason == "unknown_session"
    assert complete_store(world, answer) == 8
    assert load(world, A, ONES + TWOS).end_token == 8


def test_blocks_behind_a_partial_one_are_found_by_its_session_only():
    """Another session's store of the same tokens builds on the full blocks before it."""
    world = new_world()
    tokens = ONES + TWOS + THREES
    for from_token, end in ((0, 6), (6, 10)):
        complete_store(world, prepare_store(world, A, tokens[:end], from_token))
    assert load(world, A, tokens).end_token == 10
    for from_token in (8, 6):
        refused = prepare_store(world, B, tokens, from_token)
        assert (refused.refused, refused.end_token) == ("gap", 4)
    assert prepare_store(world, B, tokens, 4).blocks


def test_a_failed_store_leaves_nothing():
    """complete_store(success=False) frees the slots and stores nothing."""
    world = new_world()
    assert complete_store(world, prepare_store(world, A, ONES), success=False) == 0
    assert world.engine.inspection.info(A) is None
    assert world.engine.inspection.stats().tiers[0].used_bytes == 0


def test_a_partial_tail_is_replaced_by_a_block_that_contains_it():
    """Growing a partial block asks for its tokens again and drops the old block."""
    world = new_world()
    store(world, A, [*ONES, 2])
    answer = prepare_store(world, A, ONES + TWOS, from_token=4)
    assert [(b.token_offset, b.num_tokens) for b in answer.blocks] == [(4, 4)]
    complete_store(world, answer)
    assert world.engine.inspection.info(A).num_blocks == 2
    assert load(world, A, ONES + TWOS).end_token == 8


def test_a_partial_tail_the_engine_cannot_write_again_stays():
    """When the engine holds KV only from behind the partial block, new blocks start there."""
    world = new_world()
    store(world, A, [*ONES, 2])
    answer = prepare_store(world, A, ONES + TWOS, from_token=5)
    assert [(b.token_offset, b.num_tokens) for b in answer.blocks] == [(5, 3)]
    complete_store(world, answer)
    assert world.engine.inspection.info(A).num_blocks == 3
    assert load(world, A, ONES + TWOS, from_token=5).end_token == 8


def test_an_equal_prefix_is_shared_and_not_written_again():
    """A second session with the same first blocks stores only the rest."""
    world = new_world()
    store(world, A, ONES + TWOS)
    answer = store(world, B, ONES + THREES)
    assert [b.token_offset for b in answer.blocks] == [4]
    assert world.engine.inspection.info(B).shared_blocks == 1


def test_a_session_adopts_existing_blocks():
    """When every block exists there is no lease, and the session has them at once."""
    world = new_world()
    store(world, A, ONES)
    answer = store(world, B, ONES)
    assert (answer.lease_id, answer.end_token, answer.refused) == (0, 4, "")
    assert world.engine.inspection.info(B).num_tokens == 4


def test_tenants_share_nothing():
    """Equal tokens of another tenant are stored again, under other keys."""
    world = new_world()
    store(world, A, ONES)
    assert len(store(world, A._replace(tenant="other"), ONES).blocks) == 1


def test_two_sessions_commit_the_same_block():
    """The one that completes second frees its own slot and uses the first one's block."""
    world = new_world()
    first, second = prepare_store(world, A, ONES), prepare_store(world, B, ONES)
    assert len(first.blocks) == len(second.blocks) == 1
    complete_store(world, first)
    complete_store(world, second)
    assert world.engine.inspection.stats().tiers[0].num_blocks == 1
    assert world.engine.inspection.info(B).num_tokens == 4


def test_other_tokens_truncate_the_session():
    """A regenerated turn replaces the tokens behind the common prefix."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, A, ONES + THREES + ONES)
    assert load(world, A, ONES + TWOS).end_token == 4
    assert world.engine.inspection.info(A).num_tokens == 12


def test_a_shorter_store_keeps_the_longer_session():
    """Storing a prefix of the stored tokens changes nothing."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, A, ONES)
    assert world.engine.inspection.info(A).num_tokens == 8


def test_a_session_has_the_lineage_of_its_last_tokens():
    """A store of a prefix, or one that names no lineage, says nothing of later tokens."""
    world = new_world()
    after = WHOLE.after(to_bytes(ONES + TWOS), [(4, 6)])
    kept = [*ONES, 2, 2]
    for tokens, named in ((kept, after), (ONES, WHOLE), (kept, None)):
        answer = world.engine.stores.prepare(A, to_bytes(tokens), 0, ENGINE_ID, lineage=named)
        if answer.lease_id:
            complete_store(world, answer)
        world.pump()
        export = world.engine.session_files.begin_export(A)
        assert export.lineage == after


def test_an_empty_store_creates_no_session():
    """No tokens, no session."""
    world = new_world()
    assert store(world, A, []).end_token == 0
    assert world.engine.inspection.info(A) is None


def test_a_gap_is_refused_with_the_stored_length():
    """from_token beyond the stored prefix cannot be stored; the answer has the prefix's length."""
    world = new_world()
    store(world, A, ONES)
    answer = prepare_store(world, A, ONES + TWOS + THREES, from_token=8)
    assert (answer.refused, answer.end_token) == ("gap", 4)


@pytest.mark.parametrize("num_stored", [4, 6], ids=["whole block", "partial block"])
def test_a_gap_of_one_token_is_refused_too(num_stored):
    """The token's KV is nowhere: later tokens must not be taken for those stored."""
    world = new_world()
    tokens = [*ONES, *TWOS, *THREES]
    store(world, A, tokens[:num_stored])
    answer = prepare_store(world, A, tokens, from_token=num_stored + 1)
    assert (answer.refused, answer.end_token, answer.blocks) == ("gap", num_stored, ())
    answer = prepare_store(world, A, tokens, from_token=num_stored)
    assert (answer.refused, answer.end_token) == ("", 12)


def test_a_store_larger_than_the_arena_is_granted_in_parts():
    """As many blocks as have slots are granted; `more` asks to come back."""
    world = new_world(num_slots=2)
    answer = store(world, A, ONES + TWOS + THREES)
    assert (answer.end_token, answer.more) == (8, True)
    answer = prepare_store(world, A, ONES + TWOS + THREES, from_token=8)
    assert (answer.end_token, answer.more) == (12, False)


def test_a_full_arena_makes_stores_wait_for_writes():
    """While writes make blocks clean the answer is "wait"; SpaceFreed says when to repeat it."""
    world = new_world(num_slots=1)
    store(world, A, ONES, settle=False)
    assert prepare_store(world, B, TWOS).refused == "wait"
    world.events.clear()
    world.finish_io(next(iter(world.io)), IoOutcome.OK)
    assert [type(event).__name__ for event in world.events] == ["SpaceFreed"]
    assert prepare_store(world, B, TWOS).refused == ""


def test_waiting_stores_do_not_notify_each_other():
    """A store that is answered "wait" frees nothing, though it holds its base."""
    world = new_world(num_slots=1)
    store(world, B, ONES)
    store(world, A, THREES, settle=False)
    world.events.clear()
    for key, tokens in ((B, ONES + TWOS), (C, TWOS)) * 2:
        assert prepare_store(world, key, tokens).refused == "wait"
    assert not [event for event in world.events if isinstance(event, SpaceFreed)]


def test_no_space_is_the_answer_when_waiting_cannot_help():
    """Everything is pinned and there is no SSD."""
    world = new_world(num_slots=1, num_extents=0)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    assert prepare_store(world, B, TWOS).refused == "no_space"
    assert counter(world, "stores_refused") == 1


def test_existing_blocks_beyond_the_slots_are_released():
    """A planned block that exists already is held only as far as slots reach before it."""
    world = new_world(num_slots=3, num_extents=0)
    store(world, A, ONES + TWOS)
    answer = prepare_store(world, A, ONES + TWOS + THREES + ONES)
    assert (len(answer.blocks), answer.more) == (1, True)
    complete_store(world, answer)


def test_a_corrupt_base_voids_the_blocks_built_on_it():
    """The new blocks are not published."""
    world = new_world(num_slots=3)
    store(world, A, ONES)
    store(world, B, TWOS + THREES + TWOS)  # pushes A's block to SSD
    answer = prepare_store(world, A, ONES + TWOS)
    world.engine.loads.prepare(A, to_bytes(ONES), 0, ENGINE_ID)
    world.pump()
    world.finish_io(next(iter(world.io)), IoOutcome.CORRUPT)
    assert complete_store(world, answer) == 0
    assert load(world, A, ONES + TWOS).lookup is Lookup.MISS


def test_blocks_behind_a_corrupt_base_are_dropped():
    """Its other blocks are used by no session any more, and take no room."""
    world = new_world(num_slots=3)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 3)  # pushes A's blocks to SSD
    answer = prepare_store(world, A, ONES + TWOS + THREES)
    world.engine.loads.prepare(A, to_bytes(ONES), 0, ENGINE_ID)
    world.pump()
    world.finish_io(next(iter(world.io)), IoOutcome.CORRUPT)
    assert complete_store(world, answer) == 0
    world.engine.sessions.flush(B, dry_run=False)
    world.quiesce()
    assert [tier.num_blocks for tier in world.engine.inspection.stats().tiers] == [0, 0]


def test_the_bound_on_sessions_drops_the_coldest():
    """A new session beyond max_sessions replaces the least recently used one."""
    world = new_world(max_sessions=2)
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES)):
        store(world, key, tokens)
    assert world.engine.inspection.info(A) is None
    assert world.engine.inspection.info(C).num_tokens == 4


def test_no_session_is_stored_beyond_the_bound_when_none_can_go():
    """Every session is pinned or queued."""
    world = new_world(max_sessions=1)
    store(world, A, ONES)
    world.engine.sessions.pin(A, Pin.HARD)
    assert complete_store(world, prepare_store(world, B, TWOS)) == 0
    assert world.engine.inspection.stats().num_sessions == 1


def test_bad_requests_are_refused():
    """Half a token and positions outside the tokens are the caller's error."""
    world = new_world()
    with pytest.raises(InvalidRequestError, match="4 bytes a token"):
        world.engine.stores.prepare(A, b"\0" * 5, 0, ENGINE_ID)
    with pytest.raises(InvalidRequestError, match="from_token 9"):
        world.engine.stores.prepare(A, to_bytes(ONES), 9, ENGINE_ID)


def test_leases_are_bounded_and_belong_to_their_engine():
    """The bound is an error; another engine's completion is a lost lease, counted."""
    world = new_world(max_leases=1)
    answer = prepare_store(world, A, ONES)
    with pytest.raises(TooManyLeasesError):
        prepare_store(world, B, ONES)
    with pytest.raises(LeaseLostError):
        world.engine.stores.complete(answer.lease_id, ENGINE_ID + 1, success=True)
    with pytest.raises(LeaseLostError):
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    assert counter(world, "leases_lost") == 1


def test_the_end_of_a_store_notifies_waiting_ones():
    """A failed one, too: its slots are free again."""
    world = new_world(num_slots=1, num_extents=0)
    answer = prepare_store(world, A, ONES)
    assert prepare_store(world, B, TWOS).refused == "wait"
    assert (counter(world, "stores_waited"), counter(world, "stores_refused")) == (1, 0)
    world.events.clear()
    complete_store(world, answer, success=False)
    assert world.events == [SpaceFreed()]
    complete_store(world, prepare_store(world, C, TWOS), success=False)
    assert world.events == [SpaceFreed()], "nobody waits any more"


def test_the_mean_size_of_a_store_is_known():
    """In granted blocks, with more weight on the last stores."""
    world = new_world()
    mean = 0.0
    for key, tokens in ((A, ONES + TWOS), (B, ONES + THREES), (C, TWOS * 3)):
        num_new = len(prepare_store(world, key, tokens).blocks)
        mean += MEAN_SHARE * (num_new - mean)
        assert world.engine._state.mean_store_blocks == mean
    assert mean > 0


def test_a_single_unstored_token_is_a_gap():
    """Be it one."""
    world = new_world()
    answer = prepare_store(world, A, ONES, from_token=1)
    assert (answer.refused, answer.end_token) == ("gap", 0)
