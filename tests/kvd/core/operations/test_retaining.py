"""Retention: sessions that clients want to keep go last, within bounds, for a time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.eviction.policies import POLICIES
from kvd.core.operations.retaining import END_BATCH
from kvd.core.records.entries import TTL_NEVER_NS, Pin
from kvd.core.records.errors import ErasingError, InvalidRequestError
from kvd.core.records.tier import Admission
from kvd.core.state.limits import TenantLimits
from kvd.core.state.session_history import MoveKind
from shared.types.session_key import SessionKey
from tests.kvd.core.operations.test_reconfiguring import is_stored, relimit
from tests.kvd.core.turns import (
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    C,
    counter,
    load,
    new_world,
    restart_committed,
    store,
    tiers_of,
    wait,
)
from tests.property.cache_world import LAYOUT, MODEL, CacheWorld
from tests.sampled import examples

D, E = (SessionKey("a", MODEL, name) for name in "de")
FOURS, FIVES = [4] * 4, [5] * 4


def retain(world: CacheWorld, key: SessionKey, retain_ns: int) -> int:
    granted_ns = world.engine.retention.retain(key, retain_ns)
    world.pump()
    return granted_ns


def num_retained(world: CacheWorld) -> int:
    return world.engine.inspection.stats().num_retained


def use(world: CacheWorld, *pairs: tuple[SessionKey, list[int]]) -> None:
    """Store sessions one after another."""
    for key, tokens in pairs:
        world.now_ns += 1
        store(world, key, tokens)


# ----------------------------------------------------------------------------------------- eviction


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_on_ssd_a_retained_session_goes_after_the_others(policy):
    """Even if it is the coldest; when all are retained, the usual order applies."""
    world = new_world(num_extents=2, policy=policy)
    use(world, (A, ONES), (B, TWOS))
    assert retain(world, A, 1000) == 1000
    use(world, (C, THREES))
    assert [tiers_of(world, key) for key in (A, B, C)] == [["DS"], ["D"], ["DS"]]
    retain(world, C, 1000)
    use(world, (D, FOURS))
    assert [tiers_of(world, key) for key in (A, B, C, D)] == [["DS"], ["D"], ["DS"], ["D"]]
    retain(world, D, 1000)
    world.quiesce()
    assert [tiers_of(world, key) for key in (A, C, D)] == [["D"], ["DS"], ["DS"]]


def test_blocks_that_ssd_refused_are_written_once_their_session_is_retained():
    """The request comes after the turn's stores, when SSD was full of other sessions."""
    world = new_world(num_extents=2)
    use(world, (A, ONES + TWOS))
    retain(world, A, 1000)
    use(world, (B, THREES))
    assert tiers_of(world, B) == ["D"]
    retain(world, B, 1000)
    world.quiesce()
    assert (tiers_of(world, B), tiers_of(world, A)) == (["DS"], ["DS", "D"])


def test_in_dram_it_gives_way_as_others_do_if_it_is_on_ssd():
    """A session that is idle for long must not keep DRAM from active ones."""
    world = new_world(num_slots=2)
    use(world, (A, ONES))
    retain(world, A, 1000)
    use(world, (B, TWOS), (C, THREES))
    assert [tiers_of(world, key) for key in (A, B, C)] == [["S"], ["DS"], ["DS"]]


def test_in_dram_it_goes_last_where_there_is_no_ssd():
    """Blocks evicted there are lost."""
    world = new_world(num_slots=2, num_extents=0)
    use(world, (A, ONES))
    retain(world, A, 1000)
    use(world, (B, TWOS), (C, THREES))
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]
    retain(world, C, 1000)
    use(world, (B, TWOS))
    assert [is_stored(world, key) for key in (A, B, C)] == [False, True, True]


def test_a_tenants_quota_takes_others_first():
    """The tenant's sessions that are not retained go first; then those that are."""
    limits = TenantLimits(quota_bytes=2 * LAYOUT.block_bytes)
    world = new_world(tenant_limits=lambda _: limits)
    use(world, (A, ONES))
    retain(world, A, 1000)
    use(world, (B, TWOS), (C, THREES))
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]
    retain(world, C, 1000)
    use(world, (D, FOURS))
    assert [is_stored(world, key) for key in (A, C, D)] == [False, True, True]


def test_a_pinned_session_goes_after_a_retained_one():
    """An operator's decision has precedence over a client's."""
    world = new_world(num_slots=2, num_extents=0)
    use(world, (A, ONES), (B, TWOS))
    world.engine.sessions.pin(A, Pin.SOFT)
    retain(world, A, 1000)
    retain(world, B, 1000)
    use(world, (C, THREES))
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]
    world.engine.sessions.pin(A, Pin.NONE)
    use(world, (B, TWOS))
    assert [is_stored(world, key) for key in (A, B, C)] == [True, True, False], "still retained"


def test_a_hard_pinned_session_is_retained_once_it_is_unpinned():
    """Until then it has no rank."""
    world = new_world(num_slots=2, num_extents=0)
    use(world, (A, ONES))
    world.engine.sessions.pin(A, Pin.HARD)
    retain(world, A, 1000)
    world.engine.sessions.pin(A, Pin.NONE)
    use(world, (B, TWOS), (C, THREES))
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]


SESSIONS = [SessionKey("a", MODEL, name) for name in "abcdef"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "retain", "unretain", "load", "wait", "end"]),
        st.integers(0, len(SESSIONS) - 1),
        st.integers(1, 3),
    ),
    max_size=30,
)


def num_blocks_in(world: CacheWorld, tier: str) -> dict[SessionKey, int]:
    """Return how many blocks each session has in a tier."""
    stored = [key for key in SESSIONS if is_stored(world, key)]
    return {key: sum(tier in each for each in tiers_of(world, key)) for key in stored}


@settings(deadline=None, max_examples=examples(150))
@given(STEPS, st.sampled_from(sorted(POLICIES)), st.booleans(), st.sampled_from(Admission))
def test_retained_blocks_are_lost_only_when_no_others_are_left(steps, policy, has_ssd, admission):
    """Under every policy: in the last tier, whatever happens to the other sessions."""
    world = new_world(
        num_slots=16 if has_ssd else 4,
        num_extents=4 if has_ssd else 0,
        policy=policy,
        admission=admission,
    )
    tier = "S" if has_ssd else "D"
    for what, number, size in steps:
        key, before = SESSIONS[number], num_blocks_in(world, tier)
        retained = {k for k in before if world.engine.inspection.info(k).retain_ns is not None}
        if what == "store":
            use(world, (key, [number * 10 + block for block in range(size) for _ in range(4)]))
        elif what == "load":
            load(world, key, [number * 10 + block for block in range(size) for _ in range(4)])
        elif what == "wait":
            wait(world, 40 * size)
        elif what == "end":
            world.engine.sessions.end(key)
        else:
            retain(world, key, 100 if what == "retain" else 0)
        world.quiesce()
        after = num_blocks_in(world, tier)
        spared = [k for k, num in after.items() if num and k not in (*retained, key)]
        for lost in (k for k in retained - {key} if after.get(k, 0) < before[k]):
            is_still = is_stored(world, lost) and world.engine.inspection.info(lost).retain_ns
            assert not (is_still and spared), (lost, spared)


# ---------------------------------------------------------------------------------------- its times


def test_a_retention_lasts_from_the_last_use():
    """A use restarts it; its end is final, and is no use."""
    world = new_world(num_extents=2)
    use(world, (A, ONES))
    retain(world, A, 100)
    info = world.engine.inspection.info(A)
    assert (info.retain_ns, info.retained_until_ns) == (100, world.now_ns + 100)
    wait(world, 60)
    load(world, A, ONES)
    wait(world, 60)
    assert num_retained(world) == 1
    use(world, (B, TWOS))
    wait(world, 39)
    assert num_retained(world) == 0
    assert world.engine.next_deadline_ns() is None
    use(world, (C, THREES))
    assert [tiers_of(world, key) for key in (A, B, C)] == [["D"], ["DS"], ["DS"]]
    kinds = [move.kind for move in world.engine.inspection.history.of(A)]
    assert (MoveKind.RETAINED in kinds, MoveKind.UNRETAINED in kinds) == (True, True)


def test_after_a_retention_a_quotas_order_is_by_last_use_again():
    """The session takes its place among the others, neither before nor behind all of them."""
    limits = TenantLimits(quota_bytes=3 * LAYOUT.block_bytes)
    world = new_world(tenant_limits=lambda _: limits)
    use(world, (A, ONES), (B, TWOS), (C, THREES))
    retain(world, B, 10)
    wait(world, 10)
    gone = []
    for key, tokens in ((D, FOURS), (E, FIVES)):
        use(world, (key, tokens))
        gone.append([is_stored(world, k) for k in (A, B, C)])
    assert gone == [[False, True, True], [False, False, True]]


def test_a_later_retention_replaces_an_earlier_one():
    """Longer, shorter or none; after its end the session is not retained."""
    world = new_world()
    use(world, (A, ONES))
    for wish_ns in (100, 1000, 10, 0, 50):
        assert retain(world, A, wish_ns) == wish_ns
        assert num_retained(world) == bool(wish_ns)
        until_ns = world.engine.inspection.info(A).retained_until_ns
        assert until_ns == (world.now_ns + wish_ns if wish_ns else None)
    world.engine.sessions.end(A)
    assert (num_retained(world), retain(world, A, 50)) == (0, 0)
    store(world, A, ONES + TWOS)
    assert retain(world, A, 50) == 50, "it has come back"
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    assert num_retained(world) == 0


def test_many_retentions_end_in_batches():
    """One call ends a bounded number; the next deadline is then already due."""
    world = new_world()
    for number in range(END_BATCH + 1):
        key = A._replace(session_id=str(number))
        store(world, key, ONES)
        retain(world, key, 100)
    wait(world, 200)
    assert num_retained(world) == 1
    assert world.engine.next_deadline_ns() <= world.now_ns
    wait(world, 0)
    assert num_retained(world) == 0


def test_invalid_retentions():
    """An unstored session, a negative time, and a tenant that is erased get none."""
    world = new_world()
    assert retain(world, A, 100) == 0
    with pytest.raises(InvalidRequestError):
        retain(world, A, -1)
    world.engine.erasing.begin(lambda tenant: tenant == "a")
    with pytest.raises(ErasingError):
        retain(world, A, 100)


# ------------------------------------------------------------------------------------------- bounds


def test_an_operator_bounds_retention():
    """For all clients or for one tenant; a shorter TTL bounds it as well, and applies."""
    limits = {"other": TenantLimits(max_retention_ns=500)}
    world = new_world(
        max_retention_ns=100, tenant_limits=lambda name: limits.get(name, TenantLimits())
    )
    use(world, (A, ONES), (OTHER_TENANT, TWOS))
    assert (retain(world, A, 1000), retain(world, OTHER_TENANT, 1000)) == (100, 500)
    assert retain(world, A, 70) == 70
    assert (counter(world, "retentions"), counter(world, "retentions_cut")) == (3, 2)
    world.engine.sessions.set_ttl(A, 50)
    assert retain(world, A, 70) == 50
    wait(world, 50)
    assert not is_stored(world, A)
    world.engine.sessions.set_ttl(OTHER_TENANT, TTL_NEVER_NS)
    assert retain(world, OTHER_TENANT, 1000) == 500


def test_without_retention_requests_are_only_counted():
    """They change nothing."""
    world = new_world(max_retention_ns=0)
    use(world, (A, ONES))
    assert (retain(world, A, 100), num_retained(world)) == (0, 0)
    assert counter(world, "retentions_cut") == 1


def test_new_bounds_apply_to_retained_sessions():
    """Retentions are cut to them; a bound that is raised again restores nothing."""
    world = new_world()
    use(world, (A, ONES), (B, TWOS))
    retain(world, A, 1000)
    retain(world, B, 20)
    relimit(world, max_retention_ns=100)
    retain_ns = [world.engine.inspection.info(key).retain_ns for key in (A, B)]
    assert retain_ns == [100, 20]
    relimit(world, max_retention_ns=10_000)
    assert world.engine.inspection.info(A).retain_ns == 100
    relimit(world, tenant_limits=lambda _: TenantLimits(max_retention_ns=0))
    assert num_retained(world) == 0


def test_a_new_quota_finds_retained_sessions():
    """They have the order that they would have, had the quota always existed."""
    world = new_world()
    use(world, (A, ONES), (B, TWOS), (C, THREES))
    retain(world, A, 1000)
    limits = TenantLimits(quota_bytes=3 * LAYOUT.block_bytes)
    relimit(world, tenant_limits=lambda _: limits)
    use(world, (D, FOURS))
    assert [is_stored(world, key) for key in (A, B, C, D)] == [True, False, True, True]


# ------------------------------------------------------------------------------------------ restart


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("has_quota", [True, False])
def test_a_retention_survives_a_restart(policy, has_quota):
    """With its time, in the orders of SSD and of a quota.

    Retentions that ended meanwhile do not.
    """
    limits = TenantLimits(quota_bytes=4 * LAYOUT.block_bytes if has_quota else None)
    world = new_world(
        num_slots=4,
        num_extents=8 if has_quota else 4,
        policy=policy,
        tenant_limits=lambda _: limits,
    )
    use(world, (A, ONES), (B, TWOS), (C, THREES), (D, FOURS))
    retain(world, A, 1000)
    retain(world, C, 10)
    world.quiesce()
    world.now_ns += 100
    restart_committed(world)
    infos = [world.engine.inspection.info(key) for key in (A, C)]
    assert [info.retain_ns for info in infos] == [1000, None]
    assert num_retained(world) == 1
    use(world, (E, FIVES))
    assert [is_stored(world, key) for key in (A, B, C, D)] == [True, False, True, True]
    world.commit(len(world.index.uncommitted))
    assert world.index.sessions[C].retain_ns is None, "its row says so, too"
    wait(world, 1000)
    assert num_retained(world) == 0
