"""Grafts: metadata only, refcounted, and never a wrong match afterwards."""

import pytest

from kvd.core.records.actions import SESSION_GRAFTED, Emit
from kvd.core.records.errors import ErasingError, InvalidRequestError
from kvd.core.state.limits import Limits
from shared.types.graft_source import GraftSource
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE, Lineage
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    counter,
    new_world,
    store,
)
from tests.property.cache_world import LAYOUT, CacheWorld, compute, to_bytes

OLD = ONES + TWOS + THREES
NEW = [1, 1, 1, 1, 7, 7]  # A's first block, then the edited tokens


def source(start: int, end: int, key=A, tokens=OLD, lineage: Lineage = WHOLE) -> GraftSource:
    return GraftSource(key, to_bytes(tokens), lineage, start, end)


def graft(world, tokens, given: GraftSource, lineage: Lineage = WHOLE, key=B) -> int:
    num_grafted = world.engine.sessions.graft(key, to_bytes(tokens), lineage, given)
    world.pump()
    world.engine.check()
    return num_grafted


def load(world, key, tokens, lineage) -> list[int]:
    """Return the rows that a load with a context's lineage finds."""
    answer = world.engine.loads.prepare(key, to_bytes(tokens), 0, ENGINE_ID, lineage=lineage)
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    rows: list[int] = []
    for span in answer.spans:
        rows += world.slots[span.slot_id][span.start :][: span.num_tokens]
    if answer.lookup is not Lookup.MISS:
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    return rows


def with_both(**limits) -> CacheWorld:
    world = new_world(**limits)
    store(world, A, OLD)
    store(world, B, NEW)
    return world


def test_a_session_continues_with_anothers_rows_without_a_copy():
    """The rows are the other one's, at new places; no slot is taken for them."""
    world = with_both()
    before = world.engine.inspection.stats().tiers
    given = source(5, 11)
    assert graft(world, NEW, given) == 6
    assert world.engine.inspection.stats().tiers == before
    tokens = NEW + OLD[5:11]
    after = given.lineage_after(to_bytes(NEW), WHOLE)
    assert load(world, B, tokens, after) == compute([], NEW) + compute([], OLD)[5:11]
    assert (counter(world, "grafts"), counter(world, "grafted_tokens")) == (1, 6)


def test_grafted_rows_are_found_by_their_session_only():
    """Neither by equal tokens without the graft, nor by a session with another graft."""
    world = with_both()
    given = source(4, 12)
    graft(world, NEW, given)
    tokens = NEW + OLD[4:12]
    assert len(load(world, B, tokens, WHOLE)) == len(NEW)
    other = source(0, 8, tokens=TWOS + THREES).lineage_after(to_bytes(NEW), WHOLE)
    assert len(load(world, B, tokens, other)) == len(NEW)
    after = given.lineage_after(to_bytes(NEW), WHOLE)
    assert len(load(world, C, tokens, after)) == len(NEW), "another session: what is before it"


def test_blocks_behind_a_graft_are_found_by_its_lineage_only():
    world = with_both()
    given = source(4, 12)
    graft(world, NEW, given)
    tokens, after = NEW + OLD[4:12] + ONES, given.lineage_after(to_bytes(NEW), WHOLE)
    rows = compute(load(world, B, tokens, after), ONES)
    answer = world.engine.stores.prepare(B, to_bytes(tokens), 0, ENGINE_ID, lineage=after)
    for block in answer.blocks:
        world.slots[block.slot_id] = rows[block.token_offset :][: block.num_tokens]
    world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
    world.quiesce()
    world.engine.check()
    assert load(world, B, tokens, after) == rows
    assert len(load(world, C, tokens, WHOLE)) == 4


def test_a_graft_survives_its_source_and_a_restart():
    """Blocks go with their last user; the entry in the index names them like any other."""
    world = with_both()
    given = source(4, 12)
    graft(world, NEW, given)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    world.quiesce()
    world.start()
    world.quiesce()
    world.engine.check()
    tokens, after = NEW + OLD[4:12], given.lineage_after(to_bytes(NEW), WHOLE)
    assert load(world, B, tokens, after) == compute([], NEW) + compute([], OLD)[4:12]


def test_a_graft_gives_the_stored_tokens_up_to_the_first_gap():
    """From the first token of the range on; the rest is missing."""
    world = new_world()
    store(world, A, OLD[:10])
    store(world, B, NEW)
    given = source(6, 12)
    assert graft(world, NEW, given) == 4
    assert world.engine.inspection.info(B).num_tokens == len(NEW) + 4
    assert graft(world, NEW, source(10, 12)) == 0, "none of it is there"


@pytest.mark.parametrize("stored", [NEW[:5], [*NEW[:4], 8, 8], []])
def test_a_session_with_other_tokens_is_not_changed(stored):
    world = new_world()
    store(world, A, OLD)
    if stored:
        store(world, B, stored)
    before = world.engine.inspection.info(B)
    assert graft(world, NEW, source(4, 12)) == 0
    assert (world.engine.inspection.info(B) is None) == (before is None)
    assert not counter(world, "grafts")


def test_a_repeated_graft_changes_nothing():
    """A turn was cancelled; its retry repeats the graft."""
    world = with_both()
    given = source(4, 12)
    assert graft(world, NEW, given) == 8
    num_events = counter(world, "grafts")
    world.engine.sessions.flush(A, dry_run=False)
    assert graft(world, NEW, given) == 8
    assert counter(world, "grafts") == num_events


def test_a_second_graft_follows_blocks_computed_behind_the_first():
    world = with_both()
    first = source(4, 8)
    graft(world, NEW, first)
    tokens, lineage = NEW + TWOS, first.lineage_after(to_bytes(NEW), WHOLE)
    rows = load(world, B, tokens, lineage)
    second = source(8, 12)
    assert graft(world, tokens, second, lineage) == 4
    after = second.lineage_after(to_bytes(tokens), lineage)
    assert load(world, B, tokens + THREES, after) == rows + compute([], OLD)[8:12]


def test_an_active_store_publishes_nothing_after_a_graft():
    world = with_both()
    longer = [*NEW, 9]
    answer = world.engine.stores.prepare(B, to_bytes(longer), 0, ENGINE_ID, lineage=WHOLE)
    for block in answer.blocks:
        world.slots[block.slot_id] = compute([], longer)[block.token_offset :]
    given = source(4, 12)
    assert graft(world, NEW, given) == 8
    world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=True)
    world.quiesce()
    world.engine.check()
    after = given.lineage_after(to_bytes(NEW), WHOLE)
    assert len(load(world, B, NEW + OLD[4:12], after)) == len(NEW) + 8


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (source(4, 12, key=OTHER_TENANT), NEW),
        (source(4, 12, key=B), NEW),
        (source(4, 13), NEW),
        (source(4, 4), NEW),
        (source(4, 12), []),
    ],
)
def test_invalid_grafts_are_refused(given, tokens):
    """Tenants never mix."""
    world = with_both()
    with pytest.raises(InvalidRequestError):
        graft(world, tokens, given)


@pytest.mark.parametrize("positions", ["coupled", "naive"])
def test_rows_that_depend_on_positions_are_not_given(positions):
    layout = type(LAYOUT)(LAYOUT.model, LAYOUT.layers, LAYOUT.block_tokens, positions)
    world = CacheWorld(Limits(16, 64), layout=layout)
    store(world, A, OLD)
    store(world, B, NEW)
    with pytest.raises(InvalidRequestError, match="positions"):
        graft(world, NEW, source(4, 12))


def test_a_tenant_that_is_being_erased_gets_no_graft():
    world = with_both()
    world.engine.erasing.begin(lambda tenant: tenant == A.tenant)
    with pytest.raises(ErasingError):
        graft(world, NEW, source(4, 12))


def test_a_session_with_a_graft_is_exported_completely():
    """By its lineage, like one with a discard."""
    world = with_both()
    graft(world, NEW, source(4, 12))
    files = world.engine.session_files
    export, rows = files.begin_export(B), []
    while not export.is_done:
        answer = files.prepare_export(export, 2, ENGINE_ID)
        for part in files.confirm_export(export, answer.lease_id):
            rows += world.slots[part.slot_id][part.start :][: part.num_tokens]
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    assert rows == compute([], NEW) + compute([], OLD)[4:12]


def test_a_later_discard_applies_to_grafted_tokens():
    world = with_both()
    given = source(4, 12)
    graft(world, NEW, given)
    tokens, after = NEW + OLD[4:12], given.lineage_after(to_bytes(NEW), WHOLE)
    ranges = [(5, 9)]
    assert world.engine.sessions.discard(B, to_bytes(tokens), ranges, lineage=after) == 10
    world.pump()
    world.engine.check()
    rows = compute([], NEW) + compute([], OLD)[4:12]
    left, lineage = tokens[:5] + tokens[9:], after.after(to_bytes(tokens), ranges)
    assert load(world, B, left, lineage) == rows[:5] + rows[9:]
    assert load(world, A, OLD, WHOLE) == compute([], OLD), "the other session is as it was"


def test_operators_see_a_graft():
    world = with_both()
    world.engine.sessions.graft(B, to_bytes(NEW), WHOLE, source(4, 12))
    events = [a for a in world.engine.drain() if isinstance(a, Emit)]
    assert [event.name for event in events] == [SESSION_GRAFTED]
    assert events[0].fields["num_grafted"] == "8"
    assert world.engine.inspection.history.of(B)[-1].kind.value == "grafted"
