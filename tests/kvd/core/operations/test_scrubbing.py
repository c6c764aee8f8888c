"""Scrubs: what they find and repair, and that they delay nothing."""

import pytest

from kvd.core.records.actions import Emit, HashSlots, IoOutcome, ReadBlock, VerifyExtent, VerifySlot
from kvd.core.records.errors import LeaseLostError, ScrubError
from kvd.core.records.records import ScrubReport
from shared.types.granted_slots import Lookup
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    THREES,
    TWOS,
    A,
    B,
    complete_store,
    counter,
    load,
    new_world,
    prepare_load,
    prepare_store,
    store,
    tiers_of,
)
from tests.property.cache_world import LAYOUT, SHAPE, CacheWorld

ALL = 1 << 40


def scrub(world: CacheWorld, *, repair: bool = False, max_bytes: int = ALL) -> ScrubReport:
    """Scrub everything, with all consequences."""
    scrub_id = world.engine.scrubs.begin(repair=repair)
    while True:
        step = world.engine.scrubs.step(scrub_id, max_bytes)
        world.pump()
        if step.done:
            return step.report
        for kind in (VerifySlot, VerifyExtent):
            world.finish_all(kind)


def world_with_one_block(**limits) -> CacheWorld:
    world = new_world(**limits)
    store(world, A, ONES)
    return world


def slot_of(world: CacheWorld) -> int:
    return world.engine.inspection.describe(A).blocks[0].slot_id


def extent_of(world: CacheWorld) -> int:
    return world.engine.inspection.describe(A).blocks[0].extent


def test_a_good_cache_is_checked_in_both_tiers():
    """Each copy once: whole blocks in DRAM, their sectors on SSD."""
    world = new_world()
    store(world, A, [*ONES, 2])
    store(world, B, THREES, settle=False)
    report = scrub(world)
    assert (report.dram_blocks, report.dram_bytes) == (3, 3 * LAYOUT.block_bytes)
    assert (report.ssd_blocks, report.ssd_bytes) == (2, 4096 * (5 + SHAPE.num_sectors(1)))
    assert (report.dram_corrupt, report.ssd_corrupt, report.lost, report.errors) == (0, 0, 0, 0)


def test_packed_sessions_are_checked_too():
    """Packed sessions have extents as well; a corrupt one is found."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 2)
    assert tiers_of(world, A) == ["S", "S"]
    world.damage_extent(world.engine.inspection.describe(A).blocks[1].extent)
    report = scrub(world, repair=True)
    assert (report.ssd_blocks, report.ssd_corrupt, report.lost) == (4, 1, 1)
    assert tiers_of(world, A) == ["S"]


def test_the_caller_sets_the_pace():
    """No more operations are active than it asks for; at least one, so that the scrub ends."""
    world = new_world()
    store(world, A, ONES + TWOS)
    scrub_id = world.engine.scrubs.begin(repair=False)
    step = world.engine.scrubs.step(scrub_id, 1)
    world.pump()
    assert (step.done, step.issued_bytes, len(world.io)) == (False, LAYOUT.block_bytes, 1)
    again = world.engine.scrubs.step(scrub_id, 1)
    assert (again.issued_bytes, again.report.dram_blocks) == (0, 0)
    world.engine.scrubs.end(scrub_id)
    world.quiesce()


def test_only_one_scrub_runs_at_a_time():
    """A second one is refused; an ended one cannot be continued; it reports its findings."""
    world = world_with_one_block()
    scrub_id = world.engine.scrubs.begin(repair=False)
    with pytest.raises(ScrubError, match="already running"):
        world.engine.scrubs.begin(repair=False)
    world.engine.scrubs.end(scrub_id + 1)
    world.engine.scrubs.end(scrub_id)
    with pytest.raises(ScrubError, match="has ended"):
        world.engine.scrubs.step(scrub_id, ALL)
    scrub(world)
    events = [e for e in world.events if isinstance(e, Emit) and e.name == "scrubbed"]
    assert [event.fields["dram_blocks"] for event in events] == ["0", "1"]


def test_a_corrupt_copy_in_dram_is_read_again():
    """The block stays on SSD, and the next load reads it."""
    world = world_with_one_block()
    world.damage_slot(slot_of(world))
    report = scrub(world)
    assert (report.dram_corrupt, report.lost) == (1, 0)
    assert tiers_of(world, A) == ["S"]
    assert load(world, A, ONES).end_token == 4
    assert counter(world, "blocks_corrupt_dram") == counter(world, "blocks_corrupt") == 1


def test_a_corrupt_block_in_dram_only_is_lost():
    """Its session is cut there, and the miss has the reason."""
    world = new_world(num_extents=0)
    store(world, A, ONES + TWOS)
    world.damage_slot(world.engine.inspection.describe(A).blocks[1].slot_id)
    report = scrub(world)
    assert (report.dram_corrupt, report.lost) == (1, 1)
    assert load(world, A, ONES + TWOS, from_token=4).miss_reason == "corrupt"


def test_a_reader_of_a_corrupt_copy_cannot_complete():
    """Its copied rows must not be trusted."""
    world = world_with_one_block()
    answer = prepare_load(world, A, ONES)
    world.damage_slot(slot_of(world))
    scrub(world)
    with pytest.raises(LeaseLostError):
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)


def test_a_block_that_only_a_reader_uses_is_dropped_with_it():
    """Its session has continued without it; the reader was its last user."""
    world = world_with_one_block(num_extents=0)
    answer = prepare_load(world, A, ONES)
    store(world, A, TWOS)
    world.damage_slot(answer.spans[0].slot_id)
    report = scrub(world)
    assert (report.dram_blocks, report.dram_corrupt, report.lost) == (2, 1, 0)
    assert world.engine.inspection.stats().tiers[0].num_blocks == 1


def test_a_corrupt_copy_that_is_being_written_is_dropped_at_once():
    """The write ends without a block; its extent is free again."""
    world = new_world()
    store(world, A, ONES, settle=False)
    world.damage_slot(slot_of(world))
    assert scrub(world).lost == 1
    world.quiesce()
    assert [tier.used_bytes for tier in world.engine.inspection.stats().tiers] == [0, 0]


def test_without_repair_a_corrupt_extent_is_only_counted():
    """The next read of it reports it to its session."""
    world = world_with_one_block()
    world.damage_extent(extent_of(world))
    report = scrub(world)
    assert (report.ssd_corrupt, report.repaired, report.lost) == (1, 0, 0)
    assert tiers_of(world, A) == ["DS"]


def test_repair_writes_a_good_copy_again():
    """The copy in DRAM is verified first, then replaces the bad one."""
    world = world_with_one_block()
    world.damage_extent(extent_of(world))
    report = scrub(world, repair=True)
    assert (report.ssd_corrupt, report.repaired, report.lost) == (1, 1, 0)
    world.quiesce()
    assert tiers_of(world, A) == ["DS"]
    assert scrub(world).ssd_corrupt == 0
    assert counter(world, "blocks_corrupt_ssd") == 1


def test_repair_cuts_sessions_without_a_good_copy():
    """Both copies are bad, or the only one is."""
    world = world_with_one_block()
    slot_id = slot_of(world)
    world.damage_extent(extent_of(world))
    scrub_id = world.engine.scrubs.begin(repair=True)
    world.engine.scrubs.step(scrub_id, ALL)
    world.pump()
    world.finish_all(VerifySlot)
    world.damage_slot(slot_id)
    world.finish_all(VerifyExtent)
    world.finish_all(VerifySlot)
    step = world.engine.scrubs.step(scrub_id, ALL)
    assert (step.report.dram_corrupt, step.report.ssd_corrupt, step.report.lost) == (1, 1, 1)
    assert world.engine.inspection.info(A) is None


def test_a_block_that_moved_during_the_scrub_is_not_judged():
    """A slot or extent that now has another block is not that block's corruption."""
    world = new_world(num_slots=1, num_extents=1)
    store(world, A, ONES)
    scrub_id = world.engine.scrubs.begin(repair=True)
    world.engine.scrubs.step(scrub_id, ALL)
    world.pump()
    checks = {**world.io}
    world.io = {}
    store(world, B, TWOS)
    world.io.update(checks)
    world.quiesce()
    step = world.engine.scrubs.step(scrub_id, ALL)
    assert step.done
    assert step.report == ScrubReport()
    assert load(world, B, TWOS).lookup is Lookup.HIT


def test_an_io_error_is_not_corruption():
    """It is counted as an error, and no block is dropped."""
    world = world_with_one_block()
    scrub_id = world.engine.scrubs.begin(repair=True)
    world.engine.scrubs.step(scrub_id, ALL)
    world.pump()
    for kind in (VerifySlot, VerifyExtent):
        world.finish_all(kind, IoOutcome.TRANSIENT)
    step = world.engine.scrubs.step(scrub_id, ALL)
    assert (step.done, step.report) == (True, ScrubReport(errors=2))
    assert tiers_of(world, A) == ["DS"]


def test_a_block_that_a_load_verifies_is_left_to_it():
    """The load handles the result, once."""
    world = world_with_one_block(verify_on_load=True)
    scrub_id = world.engine.scrubs.begin(repair=True)
    world.engine.scrubs.step(scrub_id, ALL)
    world.pump()
    answer = prepare_load(world, A, ONES)
    world.damage_slot(slot_of(world))
    world.damage_extent(extent_of(world))
    first, second = world.io_of(VerifySlot)
    world.finish_io(first)
    world.finish_all(VerifyExtent)
    assert counter(world, "blocks_corrupt_dram") == 0
    world.finish_io(second)
    world.finish_all(ReadBlock)
    assert world.engine.loads.settle(answer.lease_id).miss_reason == "corrupt"
    assert counter(world, "blocks_corrupt_dram") == 1


def test_blocks_that_come_and_go_during_a_scrub():
    """The scrub checks the blocks that exist when it reaches them."""
    world = new_world(num_slots=4)
    store(world, A, ONES + TWOS)
    store(world, B, THREES)
    scrub_id = world.engine.scrubs.begin(repair=False)
    world.engine.scrubs.step(scrub_id, 1)
    world.pump()
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    store(world, B, THREES + ONES)
    unhashed = prepare_store(world, A, TWOS)
    complete_store(world, unhashed)
    world.finish_all(VerifySlot)
    while not (step := world.engine.scrubs.step(scrub_id, ALL)).done:
        world.pump()
        world.finish_all(VerifySlot)
        world.finish_all(VerifyExtent)
    assert step.report.errors == step.report.dram_corrupt == step.report.ssd_corrupt == 0
    assert world.io_of(HashSlots)


def test_a_session_unpacked_during_its_scrub_is_checked_completely():
    """Its packed bytes have become blocks; none is left out."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 2)
    first, second = (block.extent for block in world.engine.inspection.describe(A).blocks)
    world.damage_extent(second)
    scrub_id = world.engine.scrubs.begin(repair=False)
    while not (step := world.engine.scrubs.step(scrub_id, 1)).done:
        world.pump()
        checks = [world.io[op_id] for op_id in world.io_of(VerifyExtent)]
        if [check.extent for check in checks] == [first]:
            prepare_load(world, A, ONES)
        world.quiesce()
    assert step.report.ssd_corrupt == 1


def test_a_session_that_is_unpacked_meanwhile_is_checked():
    """Its blocks were unknown when the scrub began, and are not packed any more when it arrives."""
    world = new_world(num_slots=2)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * 2)
    scrub_id = world.engine.scrubs.begin(repair=False)
    world.engine.scrubs.step(scrub_id, 1)
    world.pump()
    assert load(world, A, ONES + TWOS).end_token == 8
    while not (step := world.engine.scrubs.step(scrub_id, ALL)).done:
        world.pump()
        world.quiesce()
    assert step.report.ssd_blocks == 4


def test_operations_of_an_ended_scrub_do_not_count_for_another():
    """Their outcomes are ignored; the next scrub checks everything again."""
    world = world_with_one_block()
    first = world.engine.scrubs.begin(repair=False)
    world.engine.scrubs.step(first, ALL)
    world.pump()
    world.engine.scrubs.end(first)
    assert not world.engine._state.scrubbed
    second = world.engine.scrubs.begin(repair=False)
    with pytest.raises(ScrubError, match="has ended"):
        world.engine.scrubs.step(first, ALL)
    for kind in (VerifySlot, VerifyExtent):
        world.finish_all(kind)
    step = world.engine.scrubs.step(second, 0)
    assert (step.done, step.report.dram_blocks, step.report.ssd_blocks) == (False, 0, 0)
    world.engine.scrubs.step(second, ALL)
    world.pump()
    for kind in (VerifySlot, VerifyExtent):
        world.finish_all(kind)
    step = world.engine.scrubs.step(second, ALL)
    assert (step.done, step.report.dram_blocks, step.report.ssd_blocks) == (True, 1, 1)


def test_a_scrub_delays_no_load():
    """Its reads of DRAM give way to those that loads wait for."""
    world = world_with_one_block()
    world.engine.scrubs.step(world.engine.scrubs.begin(repair=False), ALL)
    world.pump()
    assert [world.io[op_id].urgent for op_id in world.io_of(VerifySlot)] == [False]
