"""Hints of engines: sessions that await tools, and sessions that others supersede."""

import pytest

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.policy import EvictionPolicy
from kvd.core.records.actions import Emit
from kvd.core.records.errors import ErasingError
from kvd.core.state.limits import TenantLimits
from kvd.core.state.session_history import MoveKind
from shared.types.awaited_tools import MAX_AWAITED_TOOLS, InvalidToolNamesError
from shared.types.queue_delta import QueuedRequest
from shared.types.session_key import SessionKey
from tests.kvd.core.operations.test_reconfiguring import is_stored
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
    load,
    new_world,
    queue_of,
    restart_committed,
    store,
    tiers_of,
    wait,
    world_with_a_on_ssd,
)
from tests.property.cache_world import LAYOUT, CacheWorld, to_bytes
from tests.queue_changes import queue_change

ALWAYS = queue_change([QueuedRequest((0, 0.0, 99), SessionKey("a", "m", "always"))])
WHERE = ("dram", "ssd", "gone")


class HeardPolicy(EvictionPolicy):
    """Records the hints that it receives."""

    name = "heard"

    def __init__(self, context):
        super().__init__(context)
        self.heard = []

    def on_await(self, key, tools, now_ns):
        self.heard.append((key.session_id, tools, now_ns))


def await_tools(world: CacheWorld, key: SessionKey, *tools: str) -> bool:
    return world.engine.expectations.expect(key, tools, superseded=False)


def supersede(world: CacheWorld, key: SessionKey) -> bool:
    return world.engine.expectations.expect(key, (), superseded=True)


def expectations_of(world: CacheWorld, key: SessionKey) -> tuple[tuple[str, ...], bool]:
    info = world.engine.inspection.info(key)
    return info.awaited_tools, info.superseded


def moves(world: CacheWorld, key: SessionKey) -> list[tuple[MoveKind, str]]:
    return [(move.kind, move.why) for move in world.engine.inspection.history.of(key)]


def returns(world: CacheWorld, kind: str = "returns") -> tuple[int, ...]:
    return tuple(counter(world, f"{kind}_{where}") for where in WHERE)


def arrive(world: CacheWorld, key: SessionKey, number: int = 1) -> None:
    """Let a turn of a session begin to wait, at an attached engine."""
    change = queue_change([QueuedRequest((0, 0.0, number), key)])
    world.engine.engines.change_queue(ENGINE_ID, change)


# ------------------------------------------------------------------------------------------- tools


def test_a_session_awaits_tools_until_its_turn_arrives():
    """Operators see the tools, while it waits and in its history."""
    world = new_world()
    store(world, A, ONES)
    world.now_ns += 7
    assert await_tools(world, A, "bash", "read", "bash")
    assert expectations_of(world, A) == (("bash", "read"), False)
    assert moves(world, A)[-1] == (MoveKind.AWAITING, "bash, read")
    world.pump()
    told = [event for event in world.events if isinstance(event, Emit)][-1]
    assert (told.name, told.fields) == ("session_awaiting", {"tools": "bash, read"})
    world.engine.engines.change_queue(ENGINE_ID, ALWAYS)
    assert expectations_of(world, A) == (("bash", "read"), False)
    arrive(world, A)
    assert expectations_of(world, A) == ((), False)
    assert counter(world, "awaits") == 1


@pytest.mark.parametrize("use", [load, store])
def test_a_use_ends_the_wait_without_a_queue(use):
    world = new_world()
    store(world, A, ONES)
    await_tools(world, A, "bash")
    use(world, A, ONES + TWOS)
    assert expectations_of(world, A) == ((), False)


def test_a_load_may_come_before_its_turn_is_reported():
    """They arrive in any order: the return is counted as that of a session with tools."""
    world = new_world()
    store(world, A, ONES)
    await_tools(world, A, "bash")
    load(world, A, ONES + TWOS)
    arrive(world, A)
    assert [counter(world, name) for name in ("returns_dram", "tool_returns_dram")] == [1, 1]


def test_the_policy_is_told_the_tools_and_when():
    """Once each, for unstored sessions too; not for an answer that calls no tools."""
    world = CacheWorld(new_world().limits, HeardPolicy)
    store(world, A, ONES)
    world.now_ns += 5
    world.pump()
    assert await_tools(world, A, "bash", "bash")
    assert not await_tools(world, B, "read")
    await_tools(world, A)
    policy = world.engine._state.policy
    assert policy.heard == [("a", ("bash",), world.now_ns), ("b", ("read",), world.now_ns)]
    assert moves(world, B) == []


def test_a_hint_after_the_turn_changes_nothing():
    """The session is back already."""
    world = new_world()
    for key in (A, B):
        store(world, key, ONES)
        world.engine.engines.replace_queue(ENGINE_ID, queue_of(A, B))
    assert await_tools(world, A, "bash")
    assert supersede(world, B)
    assert [expectations_of(world, key) for key in (A, B)] == [((), False)] * 2
    assert counter(world, "awaits") == counter(world, "supersedes") == 0


def test_an_ended_session_is_not_expected():
    world = new_world()
    store(world, A, ONES)
    world.engine.sessions.end(A)
    assert await_tools(world, A, "bash")
    assert expectations_of(world, A) == ((), False)


@pytest.mark.parametrize(
    "names", [("",), ("a" * 129,), ("two\nlines",), map(str, range(MAX_AWAITED_TOOLS + 1))]
)
def test_names_are_bounded(names):
    """With a bad name, or one too many, the whole hint is refused."""
    world = new_world()
    store(world, A, ONES)
    with pytest.raises(InvalidToolNamesError):
        await_tools(world, A, "good", *names)
    assert expectations_of(world, A) == ((), False)


def test_a_tenant_that_is_erased_is_not_expected():
    world = new_world()
    store(world, A, ONES)
    world.engine.erasing.begin(lambda tenant: tenant == "a")
    with pytest.raises(ErasingError):
        await_tools(world, A, "bash")
    assert not await_tools(world, OTHER_TENANT, "bash")


def test_a_restart_forgets_expectations():
    """It costs a place in the order."""
    world = new_world()
    store(world, A, ONES)
    store(world, B, TWOS)
    await_tools(world, A, "bash")
    supersede(world, B)
    restart_committed(world)
    assert [expectations_of(world, key) for key in (A, B)] == [((), False)] * 2


# -------------------------------------------------------------------------------------- superseded


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_superseded_session_goes_first_from_every_tier(policy):
    """Although it was used last."""
    for bounds, tiers in (
        ({"num_slots": 2}, [["DS"], ["S"], ["DS"]]),
        ({"num_extents": 2}, [["DS"], ["D"], ["DS"]]),
    ):
        world = new_world(**bounds, policy=policy)
        store(world, A, ONES)
        store(world, B, TWOS)
        assert supersede(world, B)
        store(world, C, THREES)
        assert [tiers_of(world, key) for key in (A, B, C)] == tiers


@pytest.mark.parametrize("use", [load, store])
def test_a_use_ends_being_superseded(use):
    """Then it is used, expected, and dropped like any other."""
    world = new_world(num_slots=2, num_extents=0)
    store(world, A, ONES)
    supersede(world, A)
    assert expectations_of(world, A) == ((), True)
    use(world, A, ONES)
    assert expectations_of(world, A) == ((), False)
    store(world, B, TWOS)
    supersede(world, B)
    store(world, C, THREES)
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]


def test_a_superseded_session_awaits_nothing():
    """It is reported once, however often the hint comes."""
    world = new_world()
    store(world, A, ONES)
    await_tools(world, A, "bash")
    supersede(world, A)
    supersede(world, A)
    assert expectations_of(world, A) == ((), True)
    assert moves(world, A)[-2:] == [(MoveKind.AWAITING, "bash"), (MoveKind.SUPERSEDED, "")]
    assert counter(world, "supersedes") == 1
    assert not supersede(world, B)


def test_a_later_hint_about_tools_belongs_to_an_earlier_turn():
    """A superseded session was not used since: its tools belong to a turn before that."""
    world = new_world()
    store(world, A, ONES)
    supersede(world, A)
    assert await_tools(world, A, "bash")
    world.engine.check()
    assert expectations_of(world, A) == ((), True)
    assert counter(world, "awaits") == 0


def test_a_tenants_quota_takes_a_superseded_session_first():
    limits = TenantLimits(quota_bytes=2 * LAYOUT.block_bytes)
    world = new_world(tenant_limits=lambda _: limits)
    store(world, A, ONES)
    store(world, B, TWOS)
    supersede(world, B)
    store(world, C, THREES)
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]


def test_a_retained_superseded_session_stays_retained():
    """It goes before others that are retained all the same."""
    world = new_world(num_slots=2, num_extents=0)
    store(world, A, ONES)
    world.engine.retention.retain(A, 10**9)
    supersede(world, A)
    store(world, B, TWOS)
    store(world, C, THREES)
    assert [is_stored(world, key) for key in (A, B, C)] == [True, False, True]
    world.engine.retention.retain(C, 10**9)
    store(world, B, TWOS)
    assert [is_stored(world, key) for key in (A, B, C)] == [False, True, True]


# ------------------------------------------------------------------------------ where they were


def test_returns_are_counted_by_the_sessions_tier():
    """In DRAM if all of it is; each turn once, however often the queue names it."""
    world = world_with_a_on_ssd()
    world.engine.engines.change_queue(ENGINE_ID, ALWAYS)
    arrive(world, A)
    arrive(world, B, 2)
    assert returns(world) == (1, 1, 0)
    again = queue_change([QueuedRequest((0, 5.0, number), key) for number, key in ((1, A), (2, B))])
    world.engine.engines.change_queue(ENGINE_ID, again)
    world.engine.engines.replace_queue(ENGINE_ID, again)
    assert returns(world) == (1, 1, 0)
    assert returns(world, "tool_returns") == (0, 0, 0)


def test_a_session_partly_in_dram_counts_as_on_ssd():
    world = new_world(num_slots=3)
    store(world, A, ONES + TWOS)
    store(world, B, THREES + [4] * 4)
    assert sorted(tiers_of(world, A)) == ["DS", "S"]
    world.engine.engines.change_queue(ENGINE_ID, ALWAYS)
    arrive(world, A)
    assert returns(world) == (0, 1, 0)


def test_returns_after_tools_are_counted_separately():
    """Dropped sessions count too, as long as they are remembered."""
    world = world_with_a_on_ssd()
    gone = SessionKey("a", A.model, "gone")
    store(world, gone, [7] * 4)
    world.engine.engines.change_queue(ENGINE_ID, ALWAYS)
    for key in (A, B, gone):
        await_tools(world, key, "bash")
    world.engine.sessions.flush(gone, dry_run=False)
    for number, key in enumerate((A, B, gone, C)):
        arrive(world, key, number)
    assert returns(world) == returns(world, "tool_returns")
    assert returns(world)[2] == 1
    assert sum(returns(world)) == 3


def test_a_missed_session_does_not_await_tools_any_more():
    """Its turn has come and gone; a later one is another turn."""
    world = new_world()
    store(world, A, ONES)
    await_tools(world, A, "bash")
    world.engine.sessions.flush(A, dry_run=False)
    world.engine.engines.change_queue(ENGINE_ID, ALWAYS)
    world.engine.loads.prepare(A, to_bytes(ONES), 0, ENGINE_ID)
    arrive(world, A)
    assert returns(world) == (0, 0, 1)
    assert returns(world, "tool_returns") == (0, 0, 0)


def test_turns_in_the_first_queue_are_no_returns():
    """Their arrival times are unknown."""
    world = new_world()
    store(world, A, ONES)
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A))
    world.engine.engines.remove(ENGINE_ID)
    wait(world, 1)
    assert returns(world) == (0, 0, 0)
