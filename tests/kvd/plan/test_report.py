"""The document for scripts, and the tables for people."""

import io
import json
from dataclasses import replace

from rich.console import Console

from kvd.plan.figures import SCHEMA
from kvd.plan.fleet import FleetOptions
from kvd.plan.report import as_document, tables
from kvd.plan.sizes import GB
from tests.kvd.plan.plans import plan, result, swept


def _text(report, width=200):
    out = io.StringIO()
    console = Console(file=out, width=width)
    for table in tables(report):
        console.print(table)
    return out.getvalue()


def test_the_document_has_a_flat_row_per_result():
    """In the order of the sweep, as JSON without inf or nan."""
    document = json.loads(json.dumps(as_document(swept()), allow_nan=False))
    assert (document["schema"], document["workload"]["recompute_load"]) == (SCHEMA, 1.25)
    assert [row["policy"] for row in document["results"][:3]] == ["lru", "belady", "lru"]
    row = document["results"][2]
    assert (row["dram_bytes"], row["ssd_bytes"]) == (8 * GB, 120 * GB)
    assert (row["hits_tok"], row["cost"]["total"], row["cost_against_re"]) == (0.6, 6.0, 0.6)
    assert (row["queue_mean"], row["recompute_load"]) == (37.0, 1.25)
    assert document["baselines"][0]["policy"] == "re"
    assert document["curves"][0]["knee"]["ssd_bytes"] == 120 * GB
    assert document["curves"][0]["cheapest"]["ssd_bytes"] == 240 * GB


def test_load_and_queue_are_beside_every_hit_rate():
    """In the same row."""
    rows = [line.split() for line in _text(swept()).splitlines()]
    found = [row for row in rows if "lru" in row and "60.0%" in row]
    assert found
    row = found[0]
    assert row.index("1.25") < row.index("37") < row.index("60.0%")


def test_the_tables_show_the_replay_and_the_sufficient_capacity():
    """Sessions, model, engine, prices; the knee with its hit rate, and the cheapest."""
    text = _text(swept())
    assert "a<b>.jsonl: 9 sessions, 110 turns" in text
    assert "KV 780 KB a token, window 4096" in text
    assert "2 GPUs at 5, DRAM 0.0088 and SSD 8.2e-05 a GB" in text
    assert "8 GB + 120 GB (60.0% of tokens)" in text
    assert "16 GB + 240 GB (5.50, 70.0% of tokens)" in text


def test_tables_of_figures_fit_on_a_terminal():
    """On 80 columns they equal those on 200: no cell is cut or wrapped."""
    long = plan(
        result("lookahead_queue", 999, 1010, 0.5, 4.0, num_guarded=3, guarded_fu=0.125),
        result("lru", 999, 1010, 1.0, 1234.5, ttft_mean_s=3661.0, queue_p99=1234),
    )
    narrow, wide = _text(long, width=80), _text(long)
    assert "…" not in narrow
    rows = [
        line.split() for line in wide.splitlines() if " lru " in line or "lookahead_queue" in line
    ]
    assert len(rows) == 8
    assert rows == [
        line.split() for line in narrow.splitlines() if " lru " in line or "lookahead_queue" in line
    ]


def test_recomputed_though_stored_has_a_column_if_needed():
    """Otherwise it would be empty."""
    guarded = _text(plan(result("lru", 8, 100, 0.5, 4.0, num_guarded=3, guarded_fu=0.125)))
    assert "held" in guarded
    assert "12.5%" in guarded
    assert "held" not in _text(swept())


def test_returns_with_tools_have_a_column():
    """The heading says whether hints were given; without tools there is no column."""
    facts = {"resident_fu": 0.75, "resident_tools": 0.875, "recomputed_per_turn": 1234.4}
    report = plan(result("lru", 8, 100, 0.5, 4.0, num_tool_returns=3, **facts))
    of_tools = replace(report, workload=replace(report.workload, num_tool_turns=42))
    text = _text(of_tools)
    for shown in ("110 turns, 42 of which call tools", "tool hints", "75.0%", "87.5%", "1,234"):
        assert shown in text
    unhinted = replace(of_tools, options={**report.options, "tool_hints": False})
    assert "no tool hints" in _text(unhinted)
    text = _text(swept())
    assert "when it" in text
    assert "tools" not in text
    assert "tool hints" not in text


def test_states_and_windows_have_a_table_if_the_model_has_them():
    """Their share of stored bytes and room, and the turns whose history had none."""
    shares = {"parts_of_stored": 0.61, "parts_of_dram": 0.52, "parts_of_ssd": 0.43}
    found = result("lru", 8, 100, 0.5, 4.0, stored_bytes_per_turn=2.5e8, partless_fu=0.34, **shares)
    report = plan(found)
    text = _text(replace(report, model=replace(report.model, state_bytes=72 << 20)))
    for shown in ("KV 780 KB a token, 75.5 MB a state,", "a state 3 ms and 18 ms", "250 MB"):
        assert shown in text
    (row,) = [line.split() for line in text.splitlines() if "61.0%" in line]
    assert row[-4:] == ["61.0%", "52.0%", "43.0%", "34.0%"]
    windowed = replace(report.model, windowed_bytes_per_token=5_000_000, attention_window=1024)
    text = _text(replace(report, model=windowed))
    for shown in ("KV 780 KB a token and 5 MB of the last 1024,", "a window 205 ms and 1.23 s"):
        assert shown in text
    assert "held, but no window" in text
    text = _text(report)
    assert "250 MB" in text  # a turn's stored bytes are shown for every model
    assert "a state" not in text
    assert "52.0%" not in text


def test_several_servers_have_a_table():
    """Moved bytes, and the store's part.

    Figures are of all servers, some of which were replayed.
    """
    fleet = FleetOptions(1000, 10, "session", remote_bytes_per_s=3e9, failures_per_day=0.5)
    facts = {
        "moved_fu": 0.123,
        "fetched_tok": 0.045,
        "num_retried": 1234,
        "busiest": 1.25,
        "bytes_pushed": 10**12,
        "store_puts": 60,
        "store_gets": 40,
        "span_s": 100.0,
        "prompt_tokens": 10**6,
    }
    found = result("lru", 999, 1010, 0.5, 400.0, fleet=fleet, **facts)
    text = _text(plan(found), width=80)
    for shown in (
        "10 of 1,000 replayed, remote store 3 GB/s each, all stored after 10 s",
        "each lost 0.5 times a day for 10m",
        "1,000 x 999 GB + 1.01 TB session",
    ):
        assert shown in " ".join(text.split())
    assert "waits" not in text
    computes = result(
        "lru", 999, 1010, 0.5, 400.0, fleet=replace(fleet, remote_wait=False), **facts
    )
    assert "no turn waits for it" in " ".join(_text(plan(computes), width=80).split())
    (row,) = [line.split() for line in text.splitlines() if "12.3%" in line]
    assert row[-7:] == ["12.3%", "4.5%", "1,234", "1.25", "100", "TB", "100.0"]
    (row,) = [line.split() for line in text.splitlines() if "400.00" in line]
    assert row[-1] == "4"  # of 10**8 tokens
    assert "busiest" not in _text(swept())
    document = as_document(plan(found))
    assert document["results"][0]["fleet"]["num_servers"] == 1000


def test_headings_and_legend_leave_no_abbreviation_unexplained():
    """The document's names are explained in PLAN.md."""
    words = _text(swept()).split()
    assert not {"fu", "tok", "tok/s"} & set(words)
    text = " ".join(words)
    for explained in (
        "RE: everything is recomputed",
        "later turns: those with history",
        "TTFT: time to",
    ):
        assert explained in text


def test_one_capacity_has_no_curve():
    """There is nothing to compare."""
    text = _text(plan(result("lru", 8, 100, 0.5, 4.0)))
    assert "how much" not in text
    assert "8 GB + 100 GB" in text
    assert "40.0%" in text  # of RE's cost


def test_a_missing_knee_says_why():
    """Too few capacities, or a range in which every byte brings as much."""
    two = plan(*(result("lru", 8, size, size / 500, 4.0) for size in (100, 200)))
    straight = plan(*(result("lru", 0, size, size / 500, 4.0) for size in (100, 200, 300)))
    assert "takes 3 capacities" in _text(two)
    assert "none in this range" in _text(straight)


def test_hbm_is_shown_if_it_was_varied():
    """Otherwise its column would be constant."""
    results = [result("lru", 8, 100, 0.5, 4.0, hbm_gb=size) for size in (10, 20)]
    assert "20 GB + 8 GB + 100 GB" in _text(plan(*results))


def test_a_share_of_nothing_is_a_dash():
    """Without hits there is no DRAM share; without a load (all begin at once) there is a dash."""
    text = _text(plan(result("lru", 8, 100, 0.0, 4.0, num_hits=0, recompute_load=0.0)))
    (row,) = [line for line in text.splitlines() if " lru " in line and "37" in line]
    assert row.split()[-7:] == ["-", "37", "0", "0.0%", "0.0%", "0.0%", "0"]
