"""Exports: all rows of a session, a few blocks at a time, each verified; it does not change."""

import struct

import pytest

from kvd.core.records.errors import (
    ErasingError,
    InvalidRequestError,
    LeaseLostError,
    SessionChangedError,
    UnknownLineageError,
    UnknownSessionError,
)
from shared.types.granted_slots import Lookup
from shared.types.lineage import WHOLE
from tests.kvd.core.turns import ONES, THREES, TWOS, A, B, C, counter, new_world, store, tiers_of
from tests.property.cache_world import compute, to_bytes

OPERATOR = 7  # the engine that holds the leases
TOKENS = [*ONES, *TWOS, 3, 3]


def idle_world(**limits):
    """Make a world where A is on SSD only, and packed; B has the arena."""
    world = new_world(num_slots=3, **limits)
    store(world, A, TOKENS)
    store(world, B, [7] * 12)
    return world


def lease(world, export, max_spans=1):
    """Lease the next spans and read them; return a miss, or a settled hit."""
    answer = world.engine.session_files.prepare_export(export, max_spans, OPERATOR)
    world.pump()
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    return answer


def take(world, export, max_spans=1):
    """Export the next spans; return their tokens and rows."""
    answer = lease(world, export, max_spans)
    tokens, rows = [], []
    for part in world.engine.session_files.confirm_export(export, answer.lease_id):
        rows += world.slots[part.slot_id][part.start : part.start + part.num_tokens]
        tokens += struct.unpack(f"<{part.num_tokens}I", part.token_ids)
    world.engine.loads.complete(answer.lease_id, OPERATOR)
    world.pump()
    return tokens, rows


def begin(world):
    return world.engine.session_files.begin_export(A)


@pytest.mark.parametrize("max_spans", [1, 2, 9])
def test_all_rows_are_exported_in_order(max_spans):
    """With any step, from SSD or DRAM; the last block is partial."""
    world = idle_world()
    export = begin(world)
    tokens, rows = [], []
    while not export.is_done:
        more_tokens, more_rows = take(world, export, max_spans)
        tokens += more_tokens
        rows += more_rows
    assert (tokens, rows) == (TOKENS, compute([], TOKENS))
    assert (export.num_tokens, export.lineage) == (len(TOKENS), WHOLE)


def test_spans_have_their_places_in_the_session():
    """Those of a later step, too."""
    world = idle_world()
    export = begin(world)
    take(world, export)
    assert [span.token_offset for span in lease(world, export, 9).spans] == [4, 8]


def test_an_export_does_not_count_as_a_use():
    """Neither the session's age nor the counts of loads change."""
    world = idle_world()
    before = world.engine.inspection.info(A).last_access_ns
    world.now_ns += 5
    export = begin(world)
    take(world, export, 9)
    assert world.engine.inspection.info(A).last_access_ns == before
    assert counter(world, "load_hits") == 0


def test_a_truncated_session_is_exported_with_its_lineage():
    """The rows are those computed before the discard."""
    world = idle_world()
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(0, 6)])
    world.pump()
    export = begin(world)
    assert export.lineage == WHOLE.after(to_bytes(TOKENS), [(0, 6)])
    assert take(world, export, 9) == (TOKENS[6:], compute([], TOKENS)[6:])
    assert export.is_done


def test_an_unknown_lineage_ends_the_export():
    """A restarted kvd knows the rows, but not the lineage."""
    world = idle_world()
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(4, 6)])
    world.pump()
    world.quiesce()
    world.start()
    export = begin(world)
    assert take(world, export, 9) == (ONES, compute([], ONES))
    answer = lease(world, export)
    with pytest.raises(UnknownLineageError, match="from 4 on"):
        world.engine.session_files.confirm_export(export, answer.lease_id)


def test_memory_is_verified_before_it_is_exported():
    """Wrong bytes in DRAM are replaced from SSD; a file would keep them for years."""
    world = new_world()
    store(world, A, TOKENS)
    world.damage_slot(world.engine.inspection.describe(A).blocks[1].slot_id)
    assert take(world, begin(world), 9) == (TOKENS, compute([], TOKENS))
    assert counter(world, "blocks_corrupt_dram") == 1


def test_a_session_that_changes_during_its_export_is_refused():
    """As is one that is gone, or never existed."""
    world = new_world()
    store(world, A, TOKENS)
    export = begin(world)
    take(world, export)
    world.engine.sessions.discard(A, to_bytes(TOKENS), [(0, 6)])
    world.pump()
    with pytest.raises(SessionChangedError, match="changed in the meantime"):
        lease(world, export)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    with pytest.raises(SessionChangedError, match="dropped in the meantime"):
        lease(world, export)
    with pytest.raises(UnknownSessionError):
        begin(world)


def test_corrupt_rows_are_not_exported():
    """The lease is lost before any byte is written to a file."""
    world = new_world(num_extents=0)
    store(world, A, ONES)
    world.damage_slot(world.engine.inspection.describe(A).blocks[0].slot_id)
    export = begin(world)
    answer = lease(world, export)
    assert (answer.lookup, answer.miss_reason) == (Lookup.MISS, "corrupt")
    with pytest.raises(LeaseLostError):
        world.engine.session_files.confirm_export(export, answer.lease_id)


def test_a_tenant_that_is_erased_is_neither_exported_nor_imported():
    """Nor are exports and imports that have begun."""
    world = new_world()
    store(world, A, ONES)
    files, export = world.engine.session_files, begin(world)
    world.engine.erasing.begin(lambda tenant: tenant == A.tenant)
    world.pump()
    for call in (
        lambda: begin(world),
        lambda: lease(world, export),
        lambda: files.prepare_import(C, to_bytes(ONES), 0, OPERATOR, WHOLE),
    ):
        with pytest.raises(ErasingError):
            call()


def test_an_import_stores_a_session_without_a_turn():
    """It is found like any other session, under its lineage."""
    world = new_world()
    world.now_ns += 5
    files, token_ids = world.engine.session_files, to_bytes(THREES)
    answer = files.prepare_import(C, token_ids, 0, OPERATOR, WHOLE)
    assert [lease.since_ns for lease in world.engine.inspection.leases()] == [world.now_ns]
    world.slots[answer.blocks[0].slot_id] = compute([], THREES)
    world.engine.stores.complete(answer.lease_id, OPERATOR, success=True)
    world.pump()
    world.quiesce()
    assert tiers_of(world, C) == ["DS"]
    assert world.engine.inspection.info(C).last_access_ns == world.now_ns
    with pytest.raises(InvalidRequestError):
        files.prepare_import(C, token_ids, 5, OPERATOR, WHOLE)
