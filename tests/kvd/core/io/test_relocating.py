"""Relocation: what stays when the SSD tier shrinks, and how it gets before the new end."""

from random import Random

import pytest

from kvd.core.io import relocating
from kvd.core.io.relocating import FIRST_PAUSE_NS
from kvd.core.records.actions import (
    IoOutcome,
    RelocateBlock,
    ReplaceBlock,
    VerifyExtent,
    WriteBlock,
)
from kvd.core.records.entries import Pin
from shared.types.granted_slots import Lookup
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
    prepare_load,
    store,
    tiers_of,
)
from tests.property.cache_world import MODEL, SHAPE, CacheWorld, compute, to_bytes
from tests.sampled import sampled

WHOLE = SHAPE.sectors_per_extent
BESIDE = [7] * 4


def places(world: CacheWorld) -> list[int]:
    """Return the whole extents that committed rows name, in order."""
    return sorted(block.extent // WHOLE for block in world.index.blocks.values())


def restart(world: CacheWorld, num_extents: int) -> None:
    """Start a kvd whose tier is smaller than its files, as the shell does; DRAM is lost."""
    world.start()
    world.set_capacity(num_extents)


def full_world(**limits) -> CacheWorld:
    """Make a world whose four extents are full: A is older than B, B than C, which has two."""
    world = new_world(num_extents=4, **limits)
    for key, tokens in ((A, ONES), (B, TWOS), (C, THREES + BESIDE)):
        world.now_ns += 1
        store(world, key, tokens)
    assert places(world) == [0, 1, 2, 3]
    return world


def test_the_most_recently_used_sessions_stay():
    """They are the ones behind the new end, and are moved before it to the byte."""
    world = full_world()
    restart(world, 2)
    world.quiesce()
    assert places(world) == [0, 1]
    assert load(world, C, [*THREES, *BESIDE, 9]).end_token == 8
    assert world.engine.inspection.info(A) is None
    assert world.engine.inspection.info(B) is None
    assert counter(world, "relocated_bytes") == 2 * WHOLE * 4096


@pytest.mark.parametrize("packs_sessions", [True, False])
def test_a_pinned_session_stays_whatever_its_age(packs_sessions):
    world = full_world(packs_sessions=packs_sessions)
    world.engine.sessions.pin(A, Pin.HARD)
    world.pump()
    world.quiesce()
    restart(world, 1)
    world.quiesce()
    assert places(world) == [0]
    assert load(world, A, [*ONES, 9]).end_token == 4
    assert world.engine.inspection.info(C) is None


def test_more_than_fits_that_is_hard_pinned_stays_behind_the_end():
    """Nothing of it is lost, and the files are not cut."""
    world = full_world()
    for key in (A, B, C):
        world.engine.sessions.pin(key, Pin.HARD)
    world.pump()
    world.quiesce()
    restart(world, 2)
    world.quiesce()
    assert places(world) == [0, 1, 2, 3]
    assert world.engine.set_ssd_capacity(2) == 4
    assert load(world, C, [*THREES, *BESIDE, 9]).end_token == 8
    world.engine.sessions.pin(C, Pin.NONE)
    world.set_capacity(2)
    world.quiesce()
    assert places(world) == [0, 1]


def test_until_it_is_moved_a_block_is_served_from_its_old_place():
    world = full_world()
    restart(world, 2)
    world.commit(len(world.index.uncommitted))
    assert len(world.io_of(RelocateBlock)) == 2
    answer = prepare_load(world, C, [*THREES, *BESIDE, 9])
    assert answer.lookup is Lookup.PENDING
    world.finish_all(RelocateBlock)  # they are read at the moment: the copies are dropped
    assert not any(isinstance(action, ReplaceBlock) for action in world.index.uncommitted)
    world.quiesce()
    assert world.engine.loads.settle(answer.lease_id).end_token == 8
    world.now_ns += FIRST_PAUSE_NS
    world.engine.expire()
    world.quiesce()
    assert places(world) == [0, 1]


@pytest.mark.parametrize("num_extents", [2, 4])
@pytest.mark.parametrize("num_committed", range(8))
def test_a_kill_at_any_time_leaves_the_old_or_the_new_place(num_committed, num_extents):
    """The next kvd continues with the same size; with the old size it keeps what is there."""
    world = full_world()
    restart(world, 2)
    world.commit(num_committed)
    world.finish_all(RelocateBlock)
    world.commit(max(0, num_committed - 4))
    world.set_capacity(2)
    restart(world, num_extents)
    world.quiesce()
    assert load(world, C, [*THREES, *BESIDE, 9]).end_token == 8
    world.set_capacity(num_extents)
    assert num_extents == 4 or places(world) == [0, 1]


def test_files_are_cut_only_when_the_rows_behind_are_gone():
    """An old row that a kill brings back must find its extent."""
    world = full_world()
    restart(world, 2)
    world.finish_all(RelocateBlock)
    world.commit(len(world.index.uncommitted))
    world.finish_all(RelocateBlock)
    assert world.engine.set_ssd_capacity(2) == 4
    world.pump()
    world.quiesce()
    assert world.engine.set_ssd_capacity(2) <= 2
    assert world.engine.inspection.stats().tiers[1].surplus_bytes == 0


def test_removals_of_unknown_places_keep_the_files_whole():
    """Impossible rows name places, too, until their removal is committed."""
    world = full_world()
    world.limits = new_world(num_extents=1).limits
    world.start()
    assert world.engine.set_ssd_capacity(1) is None
    world.quiesce()
    assert world.engine.set_ssd_capacity(1) == 0


def test_a_copy_of_a_block_that_goes_meanwhile_is_dropped():
    world = full_world()
    restart(world, 2)
    world.commit(len(world.index.uncommitted))
    world.engine.sessions.flush(None, dry_run=False)
    world.pump()
    world.extents.clear()
    world.quiesce()
    assert not world.index.blocks
    assert counter(world, "blocks_corrupt_ssd") == 0
    assert world.engine.inspection.stats().tiers[1].used_bytes == 0


def test_a_larger_tier_ends_the_look():
    """What was begun is completed; nothing else is moved."""
    world = full_world()
    restart(world, 2)
    world.set_capacity(8)
    world.quiesce()
    assert world.engine.next_deadline_ns() is None
    assert load(world, C, [*THREES, *BESIDE, 9]).end_token == 8


@pytest.mark.parametrize("steps", [1, 256])
def test_few_bytes_are_copied_at_a_time_in_short_calls(monkeypatch, steps):
    """The rest follows when these are done, at once."""
    monkeypatch.setattr(relocating, "MAX_BYTES", 1)
    monkeypatch.setattr(relocating, "STEPS", steps)
    world = full_world()
    restart(world, 2)
    world.commit(len(world.index.uncommitted))
    for num_left in (2, 1):
        while not world.io:
            assert world.engine.next_deadline_ns() <= world.now_ns
            world.engine.expire()
            world.pump()
        assert len(world.io_of(RelocateBlock)) == 1
        assert world.engine.next_deadline_ns() is None
        assert places(world)[-num_left] >= 2
        world.finish_all(RelocateBlock)
        world.commit(len(world.index.uncommitted))
    assert places(world) == [0, 1]


def test_a_failure_ends_the_look(monkeypatch):
    """The device is left alone for a while."""
    monkeypatch.setattr(relocating, "MAX_BYTES", 1)
    world = full_world()
    restart(world, 2)
    world.commit(len(world.index.uncommitted))
    world.finish_all(RelocateBlock, IoOutcome.TRANSIENT)
    assert not world.io_of(RelocateBlock)
    assert world.engine.next_deadline_ns() == world.now_ns + FIRST_PAUSE_NS
    assert counter(world, "write_errors") == 1


def test_no_copy_begins_when_kvd_shuts_down():
    """Those under way end."""
    world = full_world()
    restart(world, 2)
    world.engine.write_dirty()
    world.quiesce()
    assert not world.io_of(RelocateBlock)
    assert places(world) == [2, 3]
    world.engine.set_ssd_capacity(2)
    assert world.engine.next_deadline_ns() is None


def test_operators_see_how_much_lies_behind_the_end():
    world = full_world()
    restart(world, 3)
    ssd = world.engine.inspection.stats().tiers[1]
    assert (ssd.capacity_bytes, ssd.surplus_bytes) == (3 * 16384, 16384)


def test_failed_copies_are_repeated_after_a_growing_pause():
    world = full_world()
    restart(world, 2)
    world.commit(len(world.index.uncommitted))
    for factor in (1, 2, 4):
        world.finish_all(RelocateBlock, IoOutcome.TRANSIENT)
        assert world.engine.next_deadline_ns() == world.now_ns + factor * FIRST_PAUSE_NS
        world.now_ns += factor * FIRST_PAUSE_NS
        world.engine.expire()
        world.pump()
    world.quiesce()
    assert places(world) == [0, 1]


def test_a_block_whose_place_is_gone_is_lost():
    """As if it had been read; with a copy in DRAM it is written again."""
    world = full_world()
    world.start(keep_dram=True)
    world.quiesce()
    world.set_capacity(2)
    world.commit(len(world.index.uncommitted))
    world.extents.clear()
    world.finish_all(RelocateBlock)
    world.quiesce()
    assert tiers_of(world, C) == ["DS", "DS"]
    restart(world, 1)
    world.commit(len(world.index.uncommitted))
    world.extents.clear()
    world.finish_all(RelocateBlock)
    world.quiesce()
    assert world.engine.inspection.info(C) is None


def test_a_scrub_of_the_old_place_does_not_count():
    """The bytes that it reads may be cut off meanwhile."""
    world = full_world()
    restart(world, 2)
    world.commit(len(world.index.uncommitted))
    scrub_id = world.engine.scrubs.begin(repair=True)
    world.engine.scrubs.step(scrub_id, 1 << 30)
    world.pump()
    assert world.io_of(VerifyExtent)
    world.finish_all(RelocateBlock)
    world.commit(len(world.index.uncommitted))
    world.set_capacity(2)
    world.finish_all(VerifyExtent)
    assert world.engine.scrubs.step(scrub_id, 1).report.ssd_corrupt == 0
    assert load(world, C, [*THREES, *BESIDE, 9]).end_token == 8


def test_stores_find_room_while_blocks_are_moved():
    """A block that is moved does not count twice: a store evicts what it needs, and no more."""
    world = full_world()
    restart(world, 3)
    world.commit(len(world.index.uncommitted))
    assert len(world.io_of(RelocateBlock)) == 1
    world.now_ns += 1
    store(world, A, ONES, settle=False)
    world.finish_all(WriteBlock)
    world.commit(len(world.index.uncommitted))
    world.finish_all(WriteBlock)
    assert len(world.io_of(RelocateBlock)) == 1
    assert (tiers_of(world, A), tiers_of(world, C)) == (["DS"], ["S", "S"])
    assert world.engine.inspection.info(B) is None
    assert counter(world, "ssd_refused") == 0


@pytest.mark.parametrize("seed", sampled([str(seed) for seed in range(40)], 10, seed=1))
def test_at_random_what_stays_is_served_to_the_byte(seed):
    """Sizes, kills, stores of any length and loads, with completions in any order."""
    random = Random(int(seed))  # noqa: S311
    world = new_world(num_slots=24, num_extents=24)
    keys = [SessionKey("a", MODEL, str(number)) for number in range(12)]
    tokens: dict[SessionKey, list[int]] = {key: [] for key in keys}
    for _ in range(150):
        key = random.choice(keys)
        match random.randrange(8):
            case 0 | 1:
                world.now_ns += 1
                new = [random.randrange(3) for _ in range(random.randint(1, 9))]
                tokens[key] = [*tokens[key], *new][:20]
                store(world, key, tokens[key], settle=random.random() < 0.5)
            case 2:
                world.set_capacity(random.choice([4, 8, 16, 24]))
            case 3:
                world.commit(random.randint(0, 20))
                world.start(keep_dram=random.random() < 0.5)
                world.set_capacity(random.choice([4, 8, 16]))
            case 4 if tokens[key]:
                check_load(world, key, [*tokens[key], 9])
            case 5 | 6:
                for op_id in random.sample(sorted(world.io), len(world.io) // 2):
                    world.finish_io(op_id)
            case _:
                world.commit(random.randint(0, 20))
        world.now_ns += random.choice([0, 1, FIRST_PAUSE_NS])
        world.engine.expire()
        world.pump()
    world.quiesce()
    world.set_capacity(4)
    for _ in range(4):
        world.quiesce()
        world.now_ns += 16 * FIRST_PAUSE_NS
        world.engine.expire()
        world.set_capacity(4)
    world.quiesce()
    assert all(place < 4 for place in places(world))
    assert world.engine.set_ssd_capacity(4) == 0
    for key in keys:
        check_load(world, key, [*tokens[key], 9])


def check_load(world: CacheWorld, key: SessionKey, tokens: list[int]) -> None:
    """Load a session; its rows are those of its tokens."""
    answer = world.engine.loads.prepare(key, to_bytes(tokens), 0, 1)
    world.pump()
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    if answer.lookup is Lookup.HIT:
        rows = [
            row for s in answer.spans for row in world.slots[s.slot_id][s.start :][: s.num_tokens]
        ]
        assert rows == compute([], tokens)[: len(rows)]
        world.engine.loads.complete(answer.lease_id, 1)
    world.pump()
