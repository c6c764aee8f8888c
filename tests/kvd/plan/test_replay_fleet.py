"""Replays of several servers: small ones by hand, and properties of all of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.plan.fleet import FleetOptions, Outage
from kvd.plan.hardware import EngineConstants, Hardware, ReplayOptions
from kvd.plan.outcome import Outcome
from kvd.plan.replay import Replay, replay
from kvd.plan.trace import Session, Turn
from shared.types.units import NS_PER_S
from tests.kvd.plan.small_machine import LRU, MACHINE
from tests.sampled import examples

FIRST = Turn(new_tokens=10, output_tokens=6, history_tokens=0, think_s=0.0)
SECOND = Turn(new_tokens=4, output_tokens=2, history_tokens=16, think_s=12.0)
THIRD = Turn(new_tokens=2, output_tokens=2, history_tokens=22, think_s=12.0)
ALL = (FIRST, SECOND, THIRD)
REMOTE = {"remote_bytes_per_s": 1e6, "quiet_s": 0.0}


def sessions(number: int, *turns: Turn) -> list[Session]:
    return [Session(float(index), turns or ALL) for index in range(number)]


@pytest.mark.parametrize("routing", ["random", "ring", "session"])
def test_a_fleet_of_one_equals_a_single_server(routing):
    """With any routing."""
    alone = replay(sessions(5), MACHINE, LRU)
    assert replay(sessions(5), MACHINE, LRU, fleet=FleetOptions(routing=routing)) == alone


def test_sessions_are_found_at_their_servers():
    """With a ring and a session router all of them, at random a part, of many servers none."""
    hits = {
        (routing, num_servers): replay(
            sessions(40), MACHINE, LRU, fleet=FleetOptions(num_servers, 4, routing)
        ).hits_fu
        for routing in ("random", "ring", "session")
        for num_servers in (4, 10_000)
    }
    assert hits["ring", 4] == 1.0
    assert hits["session", 4] > 0.9  # some went where the wait was shorter
    assert 0.1 < hits["random", 4] < 0.6
    assert hits["random", 10_000] < 0.05
    assert hits["ring", 10_000] == 1.0


def test_a_turn_is_routed_elsewhere_where_waiting_costs_more():
    """With a fast store no turn waits behind others while a server is idle."""
    arrivals = [Session(4.0 * index, ALL) for index in range(60)]
    found = {
        routing: replay(
            arrivals,
            MACHINE,
            LRU,
            fleet=FleetOptions(4, 4, routing, remote_bytes_per_s=1e9),
        )
        for routing in ("ring", "session")
    }
    assert found["session"].busiest < found["ring"].busiest
    assert found["session"].ttft_mean_s < found["ring"].ttft_mean_s
    assert found["ring"].moved_fu == 0.0


def outcome_of(gone: list[Outage], **fleet) -> Outcome:
    """Replay six sessions on two servers, one of which leaves after their first turns."""
    options = FleetOptions(2, 2, **fleet)
    run = Replay(sessions(6), MACHINE, LRU, options, outages=gone)
    return run.run(lambda _: None)


def test_pushed_sessions_are_fetched_by_another_server():
    """Their server is lost: without a store all is recomputed; with one nothing is."""
    lost = [Outage(60 * NS_PER_S, 1, True)]
    without = outcome_of(lost)
    assert 0 < without.hits_tok < 1
    assert without.moved_fu > 0
    assert without.fetched_tok == 0
    pushed = outcome_of(lost, **REMOTE)
    assert pushed.fetched_tok > 0
    assert pushed.hits_tok == 1.0
    assert pushed.bytes_pushed > 0
    assert pushed.store_puts > 0


def test_a_draining_server_pushes_its_sessions():
    """If nothing was pushed before; a server that is lost pushes nothing."""
    moment = 61 * NS_PER_S
    drained = outcome_of([Outage(moment, 1, False)], **REMOTE, remote_write="drain")
    assert drained.hits_tok == 1.0
    assert drained.fetched_tok > 0
    assert drained.num_retried == 0
    lost = outcome_of([Outage(moment, 1, True)], **REMOTE, remote_write="drain")
    assert lost.fetched_tok == 0
    assert lost.hits_tok < 1


def test_evicted_sessions_are_pushed_and_come_back():
    """Fewer than all; with "drain" they are recomputed; with enough room none is pushed."""
    one_by_one = [
        Session(100.0 * index, (FIRST, replace(SECOND, think_s=1e3))) for index in range(6)
    ]

    def found(remote_write, dram_bytes):
        fleet = FleetOptions(**REMOTE, remote_write=remote_write)
        return replay(one_by_one, replace(MACHINE, dram_bytes=dram_bytes), LRU, fleet=fleet)

    some, none, all_of_it = (found(write, 60_000) for write in ("evicted", "drain", "all"))
    assert none.hits_tok < 1.0
    assert none.bytes_pushed == 0
    assert some.hits_tok == all_of_it.hits_tok == 1.0
    assert some.fetched_tok > 0
    assert 0 < some.bytes_pushed < all_of_it.bytes_pushed
    assert found("evicted", MACHINE.dram_bytes).bytes_pushed == 0


def test_turns_of_a_lost_server_are_restarted():
    """All turns are answered; their times count from their arrival."""
    during = [Outage(3 * NS_PER_S + NS_PER_S // 2, number, True) for number in (0, 1)]
    outcome = outcome_of(during[:1])
    both = outcome_of(during, away_s=50.0)
    for found in (outcome, both):
        assert found.num_retried > 0
        assert found.num_turns_measured >= found.num_turns == 18
    assert both.ttft_p99_s > 45.0  # there was no server


def test_turns_wait_while_no_server_is_present():
    """The first one is answered 30 s later than otherwise."""
    (session,), gone = sessions(1, FIRST), [Outage(0, 0, True)]
    fleet = FleetOptions(away_s=30.0)
    found = Replay([session], MACHINE, LRU, fleet, outages=gone).run(lambda _: None)
    alone = replay([session], MACHINE, LRU)
    assert found.ttft_mean_s == alone.ttft_mean_s + 30.0
    assert found.start_ttft_mean_s == alone.start_ttft_mean_s
    assert found.num_retried == 0


def test_a_fetch_is_waited_for_only_where_it_pays():
    """Turns do not wait for a store that is slower than computing."""
    lost = [Outage(60 * NS_PER_S, 1, True)]
    slow = replace(LRU, load_policy="auto")
    fleet = FleetOptions(2, 2, remote_bytes_per_s=10.0, quiet_s=0.0)
    run = Replay(sessions(6), MACHINE, slow, fleet, outages=lost)
    assert run.run(lambda _: None).fetched_tok == 0


FLEETS = st.builds(
    FleetOptions,
    num_servers=st.integers(3, 9),
    num_replayed=st.integers(1, 3),
    routing=st.sampled_from(["random", "ring", "session"]),
    remote_bytes_per_s=st.sampled_from([0.0, 1e3, 1e6]),
    remote_write=st.sampled_from(["all", "evicted", "drain"]),
    remote_wait=st.booleans(),
    quiet_s=st.sampled_from([0.0, 5.0]),
    failures_per_day=st.sampled_from([0.0, 3000.0]),
    drains_per_day=st.sampled_from([0.0, 3000.0]),
    away_s=st.sampled_from([1.0, 30.0]),
    seed=st.integers(0, 3),
)


@settings(max_examples=examples(200), deadline=None)
@given(
    fleet=FLEETS,
    num_sessions=st.integers(1, 12),
    dram_bytes=st.sampled_from([0, 30_000, 10**6]),
    ssd_bytes=st.sampled_from([0, 60_000, 10**6]),
    tiers=st.sampled_from(["inclusive", "exclusive"]),
    policy=st.sampled_from(["lru", "predictive", "belady"]),
    ttl_s=st.sampled_from([None, 11.0]),
    states=st.sampled_from([0, 500]),
)
def test_every_fleet_answers_every_turn(
    fleet, num_sessions, dram_bytes, ssd_bytes, tiers, policy, ttl_s, states
):
    """Whatever happens to its servers, which keep every invariant."""
    hardware = Hardware(dram_bytes, ssd_bytes, engine=EngineConstants(2, 1.0, 0.5, 1.0))
    options = ReplayOptions(
        policy, 1000, tiers=tiers, load_policy="auto", ttl_s=ttl_s, state_bytes=states
    )
    run = Replay(sessions(num_sessions), hardware, options, fleet)
    run.begin()
    num_done = 0
    for _ in range(40_000):
        num_done += run.step()
        run.check()
        if num_done == 3 * num_sessions:
            break
    outcome = run.outcome()
    assert num_done == outcome.num_turns == 3 * num_sessions
    assert outcome.num_turns_measured == num_done
    assert 0 <= outcome.fetched_tok <= outcome.hits_tok <= 1
    if not fleet.remote_bytes_per_s:
        assert outcome.bytes_pushed == outcome.bytes_fetched == outcome.store_gets == 0
