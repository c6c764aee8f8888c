"""`kvd bench` on real processes: every part gives its figures, and no file is left behind."""

import json
import os
import signal
import sys
from dataclasses import replace

import psutil
import pytest

from kvd.bench.figures import Report
from kvd.bench.options import MIB, QUICK, BenchOptions, layout_with
from kvd.bench.report import as_document
from kvd.bench.runner import run
from tests.warm_children import warm_children

TINY = replace(
    QUICK,
    name="tiny",
    arena_bytes=4 * MIB,
    arena_pairs=2,
    ssd_pass_s=0.01,
    ssd_max_bytes=8 * MIB,
    ssd_pairs=2,
    session_counts=(5, 10, 40),
    rounds=2,
    calls_per_round=10,
    queue_jobs=200,
    layouts=(layout_with(64 << 10, 2),),
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Report:
    directory = tmp_path_factory.mktemp("bench")
    with warm_children():
        report = run(BenchOptions(directory, scale=TINY, command=("kvd", "bench")))
    assert not list(directory.iterdir())
    return report


def test_arena_and_ssd_are_compared_with_their_floors(measured):
    assert [found.operation for found in measured.arena] == [
        *("store", "store_copy", "load", "load_copy"),
    ]
    assert [found.operation for found in measured.ssd] == [
        *("write", "write_huge", "read", "read_huge"),
    ]
    for found in (*measured.arena, *measured.ssd):
        assert found.num_pairs == 2
        assert found.pass_bytes > 0
        assert found.kvd_bytes_per_s > 0
        assert found.floor_bytes_per_s > 0
        assert 0 < found.ratio.low <= found.ratio.median <= found.ratio.high


def test_a_queue_is_told_at_once_and_changed(measured):
    found = measured.queue
    assert found.num_jobs == 200
    assert 0 < found.change_s.median < found.full_s.median


def test_calls_are_timed_at_every_number_of_sessions_and_on_both_levels(measured):
    found = {(entry.level, entry.operation, entry.num_sessions) for entry in measured.latencies}
    calls = ("prepare_load", "complete_load", "prepare_store", "complete_store")
    expected = {
        (level, call, n) for level in ("rpc", "core") for call in calls for n in (5, 10, 40)
    }
    assert found == expected | {("rpc", "look_up", n) for n in (5, 10, 40)}
    assert all(entry.num_calls == 20 for entry in measured.latencies)
    assert all(0 < entry.p50_us <= entry.p99_us for entry in measured.latencies)
    assert {(entry.from_sessions, entry.to_sessions) for entry in measured.growths} == {(10, 40)}
    assert len(measured.growths) == 9


def test_a_restart_finds_every_session_of_the_index(measured):
    assert measured.restart.num_restored == measured.restart.num_sessions == 40
    assert measured.restart.ready_s.median > 0
    assert measured.restart.rss_bytes > 0


def test_the_report_is_one_json_document(measured):
    document = json.loads(json.dumps(as_document(measured)))
    assert document["scale"] == "tiny"
    assert document["elapsed_s"] > 0
    assert document["goals"]


def test_ctrl_c_leaves_nothing(short_dir):
    directory, temporary = short_dir / "d", short_dir / "t"
    directory.mkdir()
    temporary.mkdir()
    bench = psutil.Popen(
        [sys.executable, "-m", "kvd", "bench", "--only", "arena", "--directory", str(directory)],
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test
        # run in the background ignores it, and a child would inherit that
    )
    try:
        while not (children := bench.children(recursive=True)):
            assert bench.poll() is None, "the bench ended before it was interrupted"
            psutil.wait_procs([bench], timeout=0.05)
        os.kill(bench.pid, signal.SIGINT)
        assert bench.wait(timeout=60) != 0
    finally:
        if bench.is_running():
            bench.kill()
    assert not any(child.is_running() for child in children)
    assert not list(directory.iterdir())
    assert not list(temporary.iterdir())
