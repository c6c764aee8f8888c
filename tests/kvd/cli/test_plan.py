"""`kvd plan` from end to end, on a small trace."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvd.plan.sizes import GB
from tests.processes import run_cli

TRACE = "tests/data/trace_sample.jsonl.gz"
SAMPLE = gzip.decompress(Path(TRACE).read_bytes())
SWEEP = ("--policy", "lru,belady", "--dram", "1GB", "--ssd", "4GB,16GB")
ONE = ("--policy", "lru", "--dram", "1GB", "--ssd", "16GB")
STARTED_S = 60.0  # for the workers to start


async def _plan(*arguments):
    plan = ("plan", "--trace", TRACE, "--jobs", "1", "--json", "-")
    code, stdout, stderr = await run_cli(*plan, *arguments)
    assert (code, stderr) == (0, "")
    return json.loads(stdout)


async def test_the_document_has_the_hit_rates():
    """One row per capacity and policy, in that order; more capacity hits more."""
    document = await _plan(*SWEEP)
    assert document["schema"] == "kvd.plan/1"
    rows = document["results"]
    assert [(row["policy"], row["ssd_bytes"] // GB) for row in rows] == [
        ("lru", 4), ("belady", 4), ("lru", 16), ("belady", 16),
    ]  # fmt: skip
    small, _, large, best = rows
    assert 0 < small["hits_tok"] < large["hits_tok"] <= best["hits_tok"] <= 1
    for name in (
        "hits_all", "hits_fu", "dram_share", "ttft_mean_s", "ttft_p99_s", "queue_mean", "gpu_hours",
        "prefill_tokens_per_s", "ssd_bytes_written", "recompute_load", "cost", "cost_against_re",
    ):  # fmt: skip
        assert name in large
    (baseline,) = document["baselines"]
    assert (baseline["hits_tok"], baseline["cost_against_re"]) == (0.0, 1.0)
    assert large["gpu_hours"] < baseline["gpu_hours"]
    assert large["ttft_mean_s"] < baseline["ttft_mean_s"]
    assert large["cost_against_re"] == pytest.approx(
        large["cost"]["total"] / baseline["cost"]["total"]
    )
    assert document["workload"]["num_turns"] == 88
    assert small["num_turns_measured"] == 88 - 17


async def test_coupled_positions_cost_hits_where_contexts_overflow():
    """The paper's OF: a truncated turn finds nothing, however large the tiers."""
    room = ("--policy", "lru", "--dram", "10TB", "--ssd", "0", "--ttl", "never")
    decoupled = (await _plan(*room))["results"][0]
    coupled = (await _plan(*room, "--positions", "coupled"))["results"][0]
    assert decoupled["hits_fu"] == 1.0
    assert coupled["hits_all"] < decoupled["hits_all"]


async def test_the_tables_have_load_and_queue_beside_the_hits(monkeypatch):
    """All columns, and both capacities; in a pipe tables have their full width."""
    monkeypatch.setenv("COLUMNS", "40")
    code, stdout, _ = await run_cli("plan", "--trace", TRACE, *SWEEP)
    assert (code, "…" in stdout) == (0, False)
    for heading in ("load", "queue", "later", "loaded", "in DRAM", "TTFT", "cost", "RE's cost"):
        assert heading in stdout
    (kvd,) = [line for line in stdout.splitlines() if line.startswith("kvd ")]
    assert kvd.rstrip().endswith("PCIe 25 GB/s")
    assert "1 GB + 16 GB" in stdout
    assert "KV 780 KB a token" in stdout


async def test_document_and_page_are_written_beside_the_tables(tmp_path: Path):
    """Each into the named file."""
    files = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ("--json", str(files[0]), "--plot", str(files[1]), "--jobs", "1")
    code, stdout, _ = await run_cli("plan", "--trace", TRACE, *SWEEP, *arguments)
    assert (code, "hits" in stdout) == (0, True)
    document = json.loads(files[0].read_text(encoding="utf-8"))
    page = files[1].read_text(encoding="utf-8")
    assert (page.count("<polyline"), len(document["results"])) == (4, 4)


async def test_drawn_sessions_are_replayed():
    """Without a trace; several processes give the same result as one."""
    drawn = ("--generate", "sharegpt-like", "--sessions", "40", "--seed", "3")
    found = []
    for jobs in ("1", "2"):
        code, stdout, _ = await run_cli("plan", *drawn, *SWEEP, "--jobs", jobs, "--json", "-")
        assert code == 0
        found.append(json.loads(stdout)["results"])
    assert found[0] == found[1]


async def test_a_raw_trace_is_replayed(tmp_path: Path):
    """Sessions are inferred, and the report says so."""
    path = tmp_path / "raw.jsonl"
    requests = [
        {"timestamp": at * 1000, "input_length": tokens, "output_length": 50, "hash_ids": ids}
        for at, tokens, ids in (
            (0, 1100, [0, 1, 2]),
            (1, 1100, [0, 3, 4]),
            (60, 1200, [0, 1, 5]),
            (90, 1300, [0, 1, 6]),
        )
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
    sizes = ("--policy", "lru", "--dram", "8GB", "--warmup-turns", "0")
    sizes += ("--jobs", "1", "--json", "-")
    code, stdout, _ = await run_cli("plan", "--trace", str(path), *sizes)
    document = json.loads(stdout)
    assert (code, document["workload"]["num_sessions"]) == (0, 2)
    assert "inferred" in document["workload"]["origin"]
    assert document["results"][0]["num_hits"] == 2


async def test_options_reach_the_replay():
    """For each group one option that changes the hit rates."""
    usual = (await _plan(*ONE))["results"][0]
    exclusive = (await _plan(*ONE, "--tiers", "exclusive"))["results"][0]
    assert exclusive["ssd_bytes_written"] != usual["ssd_bytes_written"]
    never = (await _plan(*ONE, "--load-policy", "never"))["results"][0]
    assert never["num_hits"] == 0
    short = (await _plan(*ONE, "--ttl", "1s"))["results"][0]
    assert short["hits_all"] < usual["hits_all"]
    larger = (await _plan(*ONE, "--kv-bytes-per-token", "3MB"))["results"][0]
    assert larger["hits_tok"] < usual["hits_tok"]
    faster = await _plan(*ONE, "--load", "0.5")
    assert faster["results"][0]["recompute_load"] == pytest.approx(0.5)
    cheap = (await _plan(*ONE, "--gpus", "1"))["results"][0]
    assert cheap["cost"]["gpu"] == pytest.approx(usual["cost"]["gpu"] / 2)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("no json", ":89: the line is not JSON"),
        (
            (
                '{"t": 1, "session": 99, "turn": 1, "new_tokens": 5, "output_tokens": 5,'
                ' "history_tokens": 0, "think_s": 0}'
            ),
            ":89: t is 1, which is earlier than in the line before",
        ),
        ('{"t": 1e9, "session": 99, "turn": 2}', ":89: turn 2 of session 99"),
        ('{"t": 1e9, "session": 99, "turn": 1, "new_tokens": -5}', ":89: new_tokens is -5"),
    ],
)
async def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, line, complaint):
    """Exit 2, one line: file, number, the error, the remedy."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(SAMPLE + line.encode() + b"\n")
    code, stdout, stderr = await run_cli("plan", "--trace", str(path))
    assert (code, stdout) == (2, "")
    (said,) = stderr.strip().splitlines()
    assert said.startswith(f"kvd: {path}{complaint}")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "complaint"),
    [
        (("--dram", "lots"), 2, "--dram: 'lots' is not a size"),
        (("--policy", "mru"), 2, "no such policy: mru"),
        (("--model", "gpt"), 2, "no model 'gpt'"),
        (("--prices", "none.toml"), 2, "none.toml: cannot be read"),
        (("--calibration", "none.json"), 2, "none.json: cannot be read"),
        (("--json", "none/plan.json"), 78, "none/plan.json cannot be written"),
        (("--plot", "none/plan.html"), 78, "none/plan.html cannot be written"),
        (("--plot", "plan.txt"), 78, "plan.txt has an unknown file type"),
    ],
)
async def test_contradictory_options_are_refused(arguments, exit_code, complaint):
    """One line that names the option or file, and the remedy."""
    code, stdout, stderr = await run_cli("plan", "--trace", TRACE, "--policy", "lru", *arguments)
    assert (code, stdout) == (exit_code, "")
    (said,) = stderr.strip().splitlines()
    assert complaint in said


@pytest.mark.parametrize("other", ["--paper", "--observe"])
async def test_reports_without_a_replay_take_no_trace(other):
    """With a trace it would be unclear which one is meant."""
    code, _, stderr = await run_cli("plan", "--trace", TRACE, other)
    assert (code, "cannot be combined with --trace" in stderr) == (2, True)


async def test_observing_needs_a_running_kvd(tmp_path: Path):
    """Exit 69, as with every command that asks one."""
    code, _, stderr = await run_cli("plan", "--observe", "--runtime-dir", str(tmp_path))
    assert (code, len(stderr.strip().splitlines())) == (69, 1)


def test_ctrl_c_ends_everything_at_once():
    """Exit 130, no output, and no process stays behind."""
    command = [sys.executable, "-m", "kvd", "plan", "--generate", "sharegpt-like", "--jobs", "2"]
    with subprocess.Popen(
        [*command, "--policy", "lru", "--capacity-share", "1%,2%"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        workers = _workers_of(process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        stdout, stderr = process.communicate(timeout=STARTED_S)
    assert (process.returncode, stdout, stderr) == (130, b"", b"")
    assert not [worker for worker in workers if worker.is_running()]


def _workers_of(process):
    """Wait until both workers run; return them."""
    deadline_s = time.monotonic() + STARTED_S
    while time.monotonic() < deadline_s:
        children = psutil.Process(process.pid).children()
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        if len(workers) == 2:
            return workers
        time.sleep(0.05)
    raise AssertionError("the workers never came")
