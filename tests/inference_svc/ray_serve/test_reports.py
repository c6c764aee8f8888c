"""Replicas' reports to routers: plain values, from their services' statistics."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.ray_serve.reports import (
    HALF_LIFE_S,
    PlaceTimes,
    RecentSessions,
    ended_turns,
    held_tokens,
    report_from,
    report_of,
    stats_of,
)
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.routing.hash_ring import name_hash
from shared.routing.session_router import ServerReport

REPORT = ServerReport(
    num_turns=3,
    num_places=2,
    turn_s=4.0,
    compute_s=1e-3,
    fetch_s=1e-4,
    takes_turns=False,
    sessions={name_hash("ann"): 900},
)


def test_a_report_round_trips():
    assert report_from(stats_of(REPORT)) == REPORT
    assert set(map(type, stats_of(REPORT).values())) <= {int, float, bool, dict}
    json.dumps(stats_of(REPORT))


def test_reports_of_other_versions_are_read_in_part():
    assert report_from({}) == ServerReport()
    assert report_from({"num_turns": 4, "colour": "red"}) == ServerReport(num_turns=4)


def test_a_report_is_made_from_a_services_statistics():
    model = pb.Model(
        running_turns=2,
        waiting_turns=5,
        gauges={"turn_places": 4, "prefill_tokens_per_s": 2000.0},
        counters={"turns_finished": 7, "turns_cancelled": 2, "turns_failed": 1, "steps": 99},
    )
    times = PlaceTimes()
    times.record(0.0, 1, 0)
    times.record(6.0, 1, 2)
    report = report_of(model, times, {1: 20}, takes_turns=True)
    assert report == ServerReport(
        num_turns=7,
        num_places=4,
        turn_s=3.0,
        compute_s=0.0005,
        starts_per_s=1 / 3,
        sessions={1: 20},
    )
    assert ended_turns(model) == 10


def test_a_service_without_measurements_is_idle():
    assert report_of(pb.Model(), PlaceTimes(), {}, takes_turns=True) == ServerReport()
    assert ended_turns(pb.Model()) == 0


def test_a_sessions_tokens_after_its_turn():
    usage = pb.Usage(history_tokens=100, new_tokens=20, output_tokens=10, compressed_tokens=40)
    assert held_tokens(usage) == 90
    assert held_tokens(pb.Usage(compressed_tokens=5)) == 0


# ------------------------------------------------------------------------------------ place times


@given(st.integers(1, 8), st.floats(0.5, 5.0), st.floats(0.5, 5.0))
def test_the_duration_of_equal_turns_is_found(running, turn_s, every_s):
    """So many run all the time, each equally long: periodic samples give the duration."""
    times = PlaceTimes()
    for number in range(int(5 * HALF_LIFE_S / every_s)):
        now_s = number * every_s
        times.record(now_s, running, int(now_s * running / turn_s))
    assert times.turn_s == pytest.approx(turn_s, rel=0.15)
    assert times.starts_per_s == pytest.approx(running / turn_s, rel=0.15)


def test_before_the_first_end_the_duration_is_unknown():
    times = PlaceTimes()
    assert times.turn_s == 0.0
    times.record(0.0, 2, 0)
    times.record(5.0, 2, 0)
    assert times.turn_s == 0.0
    times.record(6.0, 2, 4)
    assert times.turn_s == pytest.approx(3.0, rel=0.1)


def test_a_restarted_service_starts_new_counts():
    times = PlaceTimes()
    times.record(0.0, 1, 100)
    times.record(4.0, 1, 2)
    assert times.turn_s == pytest.approx(2.0)


def test_older_samples_count_less():
    times = PlaceTimes()
    for number in range(100):
        times.record(number * 10.0, 1, number)  # 10 s each
    for number in range(300):
        times.record(991.0 + number, 1, 99 + number)  # 1 s each
    assert times.turn_s == pytest.approx(1.0, rel=0.1)


# ---------------------------------------------------------------------------------------- sessions


def test_the_least_recently_used_session_is_forgotten():
    sessions = RecentSessions(2)
    sessions.record_use("ann", 10)
    sessions.record_use("bob", 20)
    sessions.record_use("ann", 30)
    sessions.record_use("cid", 40)
    assert sessions.as_dict() == {name_hash("ann"): 30, name_hash("cid"): 40}
