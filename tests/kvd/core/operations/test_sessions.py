"""TTLs, pins, flushes."""

from collections import Counter

import pytest

from kvd.core.inspection.session_filter import SessionFilter
from kvd.core.operations.sessions import EXPIRE_BATCH, RECHECK_NS
from kvd.core.records.actions import SESSION_ENDED, Emit
from kvd.core.records.entries import TTL_NEVER_NS, Pin
from kvd.core.records.errors import InvalidRequestError, UnknownSessionError
from kvd.core.records.tier import Admission
from kvd.core.state.limits import TenantLimits
from tests.kvd.core.turns import (
    ENGINE_ID,
    ONES,
    OTHER_TENANT,
    THREES,
    TWOS,
    A,
    B,
    counter,
    load,
    new_world,
    prepare_load,
    queue_of,
    store,
)


def expire(world, elapsed_ns: int) -> None:
    world.now_ns += elapsed_ns
    world.engine.expire()
    world.pump()


def test_dropped_sessions_leave_every_clock():
    """Long before their TTL, write-back or compaction would have been due."""
    world = new_world(
        default_ttl_ns=10**9, admission=Admission.WRITE_BACK, write_back_delay_ns=10**9
    )
    clocks = world.engine._state._clocks
    for _ in range(20):
        store(world, A, ONES)
        assert {len(clock) for clock in clocks} >= {1}
        world.engine.sessions.flush(A, dry_run=False)
        world.pump()
        assert sum(map(len, clocks)) == 0
    assert world.engine.next_deadline_ns() is None


def test_a_session_expires_after_its_last_use():
    """A use moves the deadline; without one the session is dropped."""
    world = new_world(default_ttl_ns=100)
    store(world, A, ONES)
    assert world.engine.next_deadline_ns() == world.now_ns + 100
    expire(world, 60)
    load(world, A, ONES)
    expire(world, 60)
    assert world.engine.inspection.info(A).expires_at_ns == world.now_ns + 40
    expire(world, 40)
    assert world.engine.inspection.info(A) is None
    assert world.engine.next_deadline_ns() is None


def test_a_session_has_its_own_ttl():
    """Shorter, never, and back to the default."""
    world = new_world(default_ttl_ns=1000)
    store(world, A, ONES)
    assert world.engine.sessions.set_ttl(A, 10).expires_at_ns == world.now_ns + 10
    assert world.engine.sessions.set_ttl(A, TTL_NEVER_NS).expires_at_ns is None
    expire(world, 500)
    assert world.engine.sessions.set_ttl(A, None).expires_at_ns == world.now_ns + 500
    with pytest.raises(InvalidRequestError):
        world.engine.sessions.set_ttl(A, 0)


def test_sessions_in_use_do_not_expire():
    """Leased, queued and pinned sessions are checked again later."""
    world = new_world(default_ttl_ns=100)
    store(world, A, ONES)
    lease = prepare_load(world, A, ONES)
    expire(world, 200)
    assert world.engine.next_deadline_ns() == world.now_ns + RECHECK_NS
    world.engine.loads.complete(lease.lease_id, ENGINE_ID)
    world.engine.engines.replace_queue(ENGINE_ID, queue_of(A))
    expire(world, RECHECK_NS)
    world.engine.engines.replace_queue(ENGINE_ID, queue_of())
    world.engine.sessions.pin(A, Pin.HARD)
    expire(world, RECHECK_NS)
    assert world.engine.inspection.info(A).expires_at_ns is None
    world.engine.sessions.pin(A, Pin.NONE)
    expire(world, 100)
    assert world.engine.inspection.info(A) is None


def test_many_sessions_expire_in_batches():
    """One call drops a bounded number; the next deadline is then already due."""
    world = new_world(num_slots=2, default_ttl_ns=100)
    for number in range(EXPIRE_BATCH + 1):
        store(world, A._replace(session_id=str(number)), ONES)
    expire(world, 200)
    assert world.engine.inspection.stats().num_sessions == 1
    assert world.engine.next_deadline_ns() <= world.now_ns
    expire(world, 0)
    assert world.engine.inspection.stats().num_sessions == 0


def test_a_deadline_of_a_dropped_session_has_no_effect():
    """The TTL clock may still have flushed sessions."""
    world = new_world(default_ttl_ns=100)
    store(world, A, ONES)
    world.engine.sessions.flush(A, dry_run=False)
    expire(world, 100)
    assert world.engine.next_deadline_ns() is None


def test_a_flush_frees_blocks_without_other_users():
    """The dry run reports what the flush then does; shared blocks are not counted."""
    world = new_world()
    store(world, A, ONES + TWOS)
    store(world, B, ONES)
    block_bytes = world.engine.layout.block_bytes
    dry = world.engine.sessions.flush(A, dry_run=True)
    assert world.engine.inspection.info(A) is not None
    wet = world.engine.sessions.flush(A, dry_run=False)
    assert dry == wet
    assert (wet.num_sessions, wet.freed_bytes) == (1, 2 * block_bytes)
    assert world.engine.inspection.info(B).num_tokens == 4


def test_a_flush_of_all_skips_leased_sessions():
    """Sessions in use stay, and are named."""
    world = new_world()
    store(world, A, ONES)
    store(world, B, TWOS)
    prepare_load(world, A, ONES)
    answer = world.engine.sessions.flush(None, dry_run=False)
    assert (answer.num_sessions, answer.skipped_leased) == (1, (A,))
    assert world.engine.inspection.info(B) is None


def test_unknown_sessions_are_refused():
    """A session that is not stored is an error with a remedy, except for engines."""
    world = new_world()
    for call in (
        lambda: world.engine.sessions.pin(A, Pin.SOFT),
        lambda: world.engine.sessions.pin(A, Pin.NONE),
        lambda: world.engine.sessions.set_ttl(A, None),
        lambda: world.engine.sessions.flush(A, dry_run=True),
        lambda: world.engine.inspection.describe(A),
    ):
        with pytest.raises(UnknownSessionError, match="kvd ls"):
            call()
    assert not world.engine.sessions.end(A)
    assert world.engine.sessions.discard(A, b"", []) == 0


def test_the_most_specific_ttl_applies():
    """A session's own TTL has precedence over its tenant's, and that over the default."""
    tenants = {"a": TenantLimits(ttl_ns=50), "other": TenantLimits(ttl_ns=TTL_NEVER_NS)}
    world = new_world(default_ttl_ns=100, tenant_limits=lambda t: tenants.get(t, TenantLimits()))
    third = A._replace(tenant="third")
    for key in (A, B, OTHER_TENANT, third):
        store(world, key, ONES)
    world.engine.sessions.set_ttl(B, 20)
    infos = [world.engine.inspection.info(key) for key in (A, B, OTHER_TENANT, third)]
    left = [info.expires_at_ns and info.expires_at_ns - world.now_ns for info in infos]
    assert left == [50, 20, None, 100]
    assert [info.ttl_source for info in infos] == ["tenant", "session", "tenant", "default"]
    expire(world, 60)
    assert world.engine.inspection.stats().num_sessions == 2


@pytest.mark.parametrize("pin", [Pin.SOFT, Pin.HARD])
def test_a_pin_of_either_kind_stops_the_clock(pin):
    """Its end counts as a use; a change of its kind does not."""
    world = new_world(default_ttl_ns=100)
    store(world, A, ONES)
    world.engine.sessions.pin(A, pin)
    expire(world, 200)
    assert world.engine.inspection.info(A).pin is pin
    other = Pin.HARD if pin is Pin.SOFT else Pin.SOFT
    world.engine.sessions.pin(A, other)
    assert world.engine.inspection.info(A).last_access_ns == world.now_ns - 200
    world.engine.sessions.pin(A, Pin.NONE)
    assert world.engine.inspection.info(A).expires_at_ns == world.now_ns + 100
    stats = world.engine.inspection.stats()
    assert (stats.num_soft_pins, stats.num_hard_pins) == (0, 0)


def test_pins_are_counted():
    """By kind, while the session is stored."""
    world = new_world()
    for key, pin in ((A, Pin.SOFT), (B, Pin.HARD)):
        store(world, key, ONES)
        world.engine.sessions.pin(key, pin)
    stats = world.engine.inspection.stats()
    assert (stats.num_soft_pins, stats.num_hard_pins) == (1, 1)
    world.engine.sessions.flush(None, dry_run=False)
    stats = world.engine.inspection.stats()
    assert (stats.num_soft_pins, stats.num_hard_pins) == (0, 0)


def test_chosen_sessions_are_flushed_in_steps():
    """Those that still match are flushed; leased ones are reported, and stay."""
    world = new_world()
    keys = [A._replace(session_id=str(number)) for number in range(4)]
    for key in keys:
        store(world, key, ONES)
    prepare_load(world, keys[0], ONES)
    world.now_ns += 100
    load(world, keys[3], ONES)
    idle = SessionFilter(idle_ns=100)
    assert world.engine.sessions.flushable(keys, idle) == ((keys[1], keys[2]), (keys[0],))
    answers = [world.engine.sessions.flush_selected(keys[2:], idle) for _ in range(2)]
    assert [answer.num_sessions for answer in answers] == [1, 0]
    everything = SessionFilter()
    rest = world.engine.sessions.flush_selected(keys, everything)
    assert (rest.num_sessions, rest.skipped_leased) == (2, (keys[0],))
    world.pump()
    assert world.engine.inspection.keys() == [keys[0]]


def test_the_effect_of_a_flush_is_summed_up_in_steps():
    """As much as in one step: blocks shared by sessions of two steps count once, with the last."""
    world = new_world()
    keys = [A._replace(session_id=str(number)) for number in range(4)]
    for number, key in enumerate(keys):
        store(world, key, ONES + [number] * 4)
    counted: Counter[bytes] = Counter()
    bits = [world.engine.sessions.freed_bytes([key], counted) for key in keys]
    assert bits[3] > bits[0] == bits[1] == bits[2] > 0
    assert sum(bits) == world.engine.sessions.flush(None, dry_run=True).freed_bytes
    counted = Counter()
    assert [world.engine.sessions.freed_bytes([key], counted) for key in keys[:2]] == bits[:2]


def test_events_report_what_becomes_of_a_session():
    """How much is stored, and why it was dropped."""
    world = new_world()
    store(world, A, ONES + TWOS)
    world.engine.sessions.flush(A, dry_run=False)
    world.pump()
    events = [event for event in world.events if isinstance(event, Emit) and event.key == A]
    assert [(event.name, event.fields) for event in events] == [
        ("session_stored", {"num_tokens": "8", "num_blocks": "2"}),
        ("session_flushed", {"why": "flush", "num_tokens": "8"}),
    ]


def test_dropped_sessions_are_counted():
    """Each once, by the reason."""
    world = new_world(default_ttl_ns=100)
    for key in (A, B, OTHER_TENANT):
        store(world, key, ONES)
    assert (counter(world, "sessions_flushed"), counter(world, "sessions_expired")) == (0, 0)
    world.engine.sessions.flush(A, dry_run=True)
    world.engine.sessions.flush(A, dry_run=False)
    assert (counter(world, "sessions_flushed"), counter(world, "sessions_expired")) == (1, 0)
    expire(world, 100)
    assert (counter(world, "sessions_flushed"), counter(world, "sessions_expired")) == (1, 2)


@pytest.mark.parametrize("default_ttl_ns", [None, 1000])
def test_a_new_ttl_is_checked_in_time(default_ttl_ns):
    """Even if the session's next check was later, or never."""
    world = new_world(default_ttl_ns=default_ttl_ns)
    store(world, A, ONES)
    world.engine.sessions.set_ttl(A, 1)
    assert world.engine.next_deadline_ns() == world.now_ns + 1
    expire(world, 1)
    assert world.engine.inspection.info(A) is None


def test_an_ended_session_is_counted_once_it_is_stored():
    """Its row says so, and operators see it; a use ends the state."""
    world = new_world()
    store(world, A, ONES)
    assert world.engine.sessions.end(A)
    world.quiesce()
    assert world.index.sessions[A].ended
    assert [event.name for event in world.events if isinstance(event, Emit)][-1] == SESSION_ENDED
    assert world.engine.inspection.info(A).ended
    load(world, A, ONES)
    assert not world.engine.inspection.info(A).ended
    world.quiesce()
    assert not world.index.sessions[A].ended


def test_the_end_of_an_unstored_session_is_reported():
    """It may be stored elsewhere, where it has to be removed, too."""
    world = new_world()
    world.pump()
    world.events.clear()
    assert not world.engine.sessions.end(A)
    world.pump()
    assert [(e.name, e.key) for e in world.events if isinstance(e, Emit)] == [(SESSION_ENDED, A)]


def test_a_cut_session_has_the_reason():
    """Until it is stored again: other servers may have more of it."""
    world = new_world(num_slots=2, num_extents=0)
    store(world, A, ONES + TWOS)
    assert world.engine.inspection.info(A).lost == ""
    store(world, B, THREES)
    info = world.engine.inspection.info(A)
    assert (info.num_tokens, info.lost) == (4, "evicted")
    world.engine.sessions.flush(B, dry_run=False)
    store(world, A, ONES + TWOS)
    assert world.engine.inspection.info(A).lost == ""


def test_an_ended_session_goes_first_for_its_tenants_quota():
    """And last again once it is used."""
    quota = TenantLimits(quota_bytes=1 << 30)
    world = new_world(tenant_limits=lambda _: quota)
    store(world, A, ONES)
    store(world, B, TWOS)
    order = world.engine._state.tenants.order_of(A.tenant)
    assert list(order) == [A, B]
    world.engine.sessions.end(B)
    assert list(order) == [B, A]
    load(world, B, TWOS)
    assert list(order) == [A, B]


def test_a_soft_pin_after_a_hard_one_restores_the_tenants_order():
    """It comes behind all that are not pinned; hard-pinned sessions are not in the order."""
    quota = TenantLimits(quota_bytes=1 << 30)
    world = new_world(tenant_limits=lambda _: quota)
    store(world, A, ONES)
    store(world, B, TWOS)
    order = world.engine._state.tenants.order_of(A.tenant)
    for pin, keys in ((Pin.HARD, [B]), (Pin.SOFT, [B, A]), (Pin.NONE, [B, A])):
        world.engine.sessions.pin(A, pin)
        assert list(order) == keys
        world.pump()
