"""Retained prefixes: common beginnings are kept as sessions of their own."""

import pytest

from kvd.core.records.errors import ErasingError
from shared.types.session_key import SessionKey
from tests.kvd.core.operations.test_reconfiguring import is_stored, relimit
from tests.kvd.core.operations.test_retaining import FIVES, FOURS, D, use
from tests.kvd.core.turns import (
    ENGINE_ID,
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
    tiers_of,
    wait,
)
from tests.property.cache_world import MODEL, CacheWorld, to_bytes

PREFIX = SessionKey("a", MODEL, "prefix")


def retain_prefix(world: CacheWorld, tokens: list[int], retain_ns: int) -> int:
    granted_ns = world.engine.retention.retain_prefix(PREFIX, to_bytes(tokens), retain_ns)
    world.pump()
    return granted_ns


def test_a_prefix_is_a_session_of_the_same_blocks():
    """It costs no bytes, is no turn, and outlives the session that began with it."""
    world = new_world(num_slots=4, num_extents=3)
    use(world, (A, ONES + TWOS))
    before = next(iter(world.engine.inspection.tenants))
    mean_bytes = world.engine.inspection.queue_stats().mean_session_bytes
    num_stores = counter(world, "stores")
    assert retain_prefix(world, ONES, 1000) == 1000
    after = next(iter(world.engine.inspection.tenants))
    assert (after.used_bytes, after.num_sessions) == (before.used_bytes, 2)
    assert world.engine.inspection.queue_stats().mean_session_bytes == mean_bytes
    assert counter(world, "stores") == num_stores
    assert len(list(world.engine.inspection.turns)) == 1
    info = world.engine.inspection.info(PREFIX)
    assert (info.num_tokens, info.ttl_ns, info.retain_ns) == (4, 1000, 1000)
    use(world, (B, THREES + FOURS), (C, FIVES + TWOS))
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert tiers_of(world, PREFIX)[0].endswith("S")
    answer = load(world, D, ONES + FIVES)
    assert answer.end_token == 4, "another session begins with it"


def test_a_prefix_goes_with_its_retention():
    """The longest requested time counts from each use; then it is dropped, others stay."""
    world = new_world()
    use(world, (A, ONES + TWOS))
    assert retain_prefix(world, ONES, 100) == 100
    assert retain_prefix(world, ONES, 50) == 100
    wait(world, 60)
    assert retain_prefix(world, ONES, 50) == 100, "a wish is a use"
    wait(world, 60)
    assert is_stored(world, PREFIX)
    wait(world, 40)
    assert not is_stored(world, PREFIX)
    assert is_stored(world, A)
    assert world.engine.next_deadline_ns() is None


def test_no_prefix_is_made_where_retention_is_refused():
    """Where no retention is granted, and for a tenant that is being erased."""
    world = new_world(max_retention_ns=0)
    use(world, (A, ONES))
    assert (retain_prefix(world, ONES, 100), is_stored(world, PREFIX)) == (0, False)
    assert counter(world, "retentions_cut") == 1
    world.engine.erasing.begin(lambda tenant: tenant == "a")
    with pytest.raises(ErasingError):
        retain_prefix(world, ONES, 100)


def test_a_prefix_is_kept_no_longer_than_bounds_and_ttls():
    """Whatever was granted before."""
    world = new_world(max_retention_ns=100, default_ttl_ns=80)
    use(world, (A, ONES))
    assert retain_prefix(world, ONES, 1000) == 80
    relimit(world, default_ttl_ns=30)
    assert retain_prefix(world, ONES, 10) == 30
    assert world.engine.inspection.info(PREFIX).ttl_ns == 30


def test_a_prefix_is_stored_completely_or_not_at_all():
    """There is none of tokens that are no whole blocks, or of too many sessions."""
    world = new_world(max_sessions=1)
    use(world, (A, ONES))
    assert retain_prefix(world, ONES + TWOS, 100) == 0
    assert retain_prefix(world, ONES[:2], 100) == 0
    lease = prepare_load(world, A, ONES)
    assert retain_prefix(world, ONES, 100) == 0
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    assert not is_stored(world, PREFIX)


def test_a_truncated_beginning_is_no_prefix():
    """Its KV is not that of these tokens alone."""
    world = new_world()
    use(world, (A, ONES + TWOS))
    world.engine.sessions.discard(A, to_bytes(ONES + TWOS), [(0, 4)])
    world.pump()
    assert retain_prefix(world, TWOS, 100) == 0
