"""The document for scripts, and the tables for people."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from kvd.bench.figures import (
    SCHEMA,
    Comparison,
    Growth,
    Latency,
    LoopCalls,
    Machine,
    QueueCosts,
    Report,
    Restart,
)
from kvd.bench.report import as_document, goals_of, tables
from shared.measuring.statistics import Spread

ONE = Spread(0.95, 1.0, 1.05)
STORE = Comparison("store", 1 << 20, 0, 1 << 28, 2, 5, ONE, 9e9, 9e9)
READ = Comparison("read", 1 << 16, 528_384, 1 << 28, 4, 5, ONE, 2e9, 2e9)
MACHINE = Machine(
    "a processor",
    2,
    0.1,
    1 << 34,
    "6.1",
    "madvise",
    "never",
    0,
    "ext4",
    "/dev/x",
    True,
    "3.11",
    "0.1",
    {"numpy": "2"},
)
REPORT = Report(
    started_unix_s=1.0,
    elapsed_s=60.0,
    command=("kvd", "bench"),
    scale="full",
    machine=MACHINE,
    arena=(STORE,),
    ssd=(READ,),
    latencies=(Latency("rpc", "prepare_load", 10, 100, 500.0, 900.0),),
    growths=(Growth("rpc", "prepare_load", 10_000, 200_000, ONE),),
    queue=QueueCosts(10_000, "lru", Spread(0.010, 0.012, 0.015), Spread(1e-5, 2e-5, 3e-5)),
    restart=Restart(200_000, 8, 200_000, ONE, ONE, ONE, 3 << 28, 1 << 27, 1000.0, 1200.0, 1 << 27),
    loop_calls=LoopCalls(200_000, 8, "predictive", 3.0, 1.0, 2.0, 3.0, 49.0, 4.0),
)


def test_the_document_is_json_and_names_its_schema():
    document = json.loads(json.dumps(as_document(REPORT)))
    assert document["schema"] == SCHEMA
    assert set(document) == {
        *("schema", "started_unix_s", "elapsed_s", "command", "scale", "machine"),
        *("arena", "ssd", "encryption", "latencies", "growths", "queue", "restart", "goals"),
        "loop_calls",
    }
    assert document["ssd"][0]["ratio"] == {"low": 0.95, "median": 1.0, "high": 1.05}
    assert document["machine"]["filesystem"] == "ext4"
    assert document["restart"]["rss_per_session_bytes"] == 1000.0


def test_a_part_that_was_not_run_is_null_and_has_no_goals():
    only_ssd = replace(
        REPORT,
        arena=None,
        latencies=None,
        growths=None,
        queue=None,
        restart=None,
        loop_calls=None,
    )
    document = as_document(only_ssd)
    assert document["arena"] is None
    assert document["restart"] is None
    assert [goal["what"] for goal in document["goals"]] == ["ssd read / direct I/O, 64 KiB slices"]


def test_the_tables_show_every_part():
    console = Console(width=200, record=True, file=None, quiet=False, stderr=True)
    with console.capture() as captured:
        for table in tables(REPORT, 200):
            console.print(table)
    shown = captured.get()
    for word in (
        "arena",
        "ssd",
        "control plane",
        "growth",
        "queue of 10000",
        "restart",
        "longest calls",
        "goals",
        "a processor",
    ):
        assert word in shown


@pytest.mark.parametrize(
    ("report", "what"),
    [
        (replace(REPORT, arena=(replace(STORE, ratio=Spread(0.8, 0.89, 1.2)),)), "arena store"),
        (replace(REPORT, ssd=(replace(READ, ratio=Spread(0.8, 0.89, 1.2)),)), "ssd read"),
        (
            replace(REPORT, growths=(replace(REPORT.growths[0], ratio=Spread(1, 1.31, 2)),)),
            "rpc prepare_load",
        ),
        (
            replace(REPORT, queue=replace(REPORT.queue, full_s=Spread(0, 0.021, 1))),
            "queue of 10000",
        ),
        (
            replace(REPORT, restart=replace(REPORT.restart, ready_cpu_s=Spread(4, 7.1, 8))),
            "restart",
        ),
        (replace(REPORT, restart=replace(REPORT.restart, rss_per_session_bytes=1025.0)), "memory"),
        (
            replace(REPORT, restart=replace(REPORT.restart, peak_rss_per_session_bytes=1301.0)),
            "peak memory",
        ),
        (
            replace(REPORT, loop_calls=replace(REPORT.loop_calls, expire_ms=50.1)),
            "longest call with 200000",
        ),
    ],
)
def test_a_figure_beyond_its_bound_misses_its_goal_only(report, what):
    assert all(goal.met for goal in goals_of(REPORT))
    missed = [goal.what for goal in goals_of(report) if not goal.met]
    assert len(missed) == 1
    assert missed[0].startswith(what)


def test_small_slices_have_no_goal_in_the_arena():
    small = replace(REPORT, arena=(replace(STORE, slice_bytes=1 << 16, ratio=Spread(0, 0, 0)),))
    assert all(goal.met for goal in goals_of(small))
