"""The longest calls are measured over real sessions with real consequences."""

from dataclasses import replace

from kvd.bench.control import TTL_NS, measure_loop_calls, open_run
from kvd.bench.filled_index import FilledIndexes, fill_index
from kvd.bench.options import QUICK, BenchOptions, resized
from shared.types.units import NS_PER_S

NUM_SESSIONS, NUM_BLOCKS = 600, 3


def test_every_measured_call_takes_effect(tmp_path):
    """All sessions are restored, some give way to new ones, and all expire; each call took time."""
    (tmp_path / "index").mkdir(mode=0o700)
    fill_index(tmp_path / "index", NUM_SESSIONS, NUM_BLOCKS)
    indexes = FilledIndexes(tmp_path, NUM_SESSIONS, NUM_BLOCKS)
    options = BenchOptions(tmp_path, scale=resized(QUICK, NUM_SESSIONS, NUM_BLOCKS))
    found = measure_loop_calls(options, indexes, tmp_path / "index")
    assert (found.num_sessions, found.blocks_per_session) == (NUM_SESSIONS, NUM_BLOCKS)
    assert min(found.attach_ms, found.look_ms, found.store_ms, found.expire_ms) > 0
    run = open_run(options, indexes, tmp_path / "index")
    assert run.engine.inspection.stats().num_sessions == NUM_SESSIONS
    run.time_call(lambda: run.engine.add_slots(64, 1))
    for number in range(5):
        run.store(number)
    assert run.engine.inspection.stats().counters["sessions_dropped"] >= 5
    run.now_ns += TTL_NS
    run.expire(10, NS_PER_S)
    assert run.engine.inspection.stats().num_sessions == 5  # the new ones


def test_a_new_quota_applies_to_all_sessions(tmp_path):
    """Sessions from before it are counted and ordered like new ones."""
    (tmp_path / "index").mkdir(mode=0o700)
    fill_index(tmp_path / "index", 50, NUM_BLOCKS)
    options = BenchOptions(tmp_path, scale=replace(QUICK, session_counts=(1, 2, 50)))
    run = open_run(options, FilledIndexes(tmp_path, 50, NUM_BLOCKS), tmp_path / "index")
    run.give_quota(10 * NUM_BLOCKS)
    run.expire(5, 1)
    run.engine.check()
