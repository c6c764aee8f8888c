"""Every part, small, with a real kvd.

The composition of its figures is asserted, not their values.
"""

import json
from dataclasses import replace
from functools import partial

import pytest

from inference_svc import assembly
from inference_svc.bench import copied_slots, decode, prefill
from inference_svc.bench.copied_slots import CopierNotReadyError
from inference_svc.bench.options import (
    BuffersOptions,
    CopiesOptions,
    DecodeOptions,
    DraftsOptions,
    ModelChoice,
    OverflowOptions,
    OverlapOptions,
    PositionsOptions,
    PrefillOptions,
    RunOptions,
    ServeOptions,
    SharingOptions,
    TurnsOptions,
)
from inference_svc.bench.random_model import PRESETS
from inference_svc.bench.runner import run
from inference_svc.cli.main import main
from inference_svc.runtime.attention.paged_attention import PagedAttention
from inference_svc.runtime.cuda.copier_arena import CopierArena
from inference_svc.runtime.cuda.copier_link import CopierLink
from tests.fake_cuda_path import GPUS, fake_cuda
from tests.host_driver import HostDriver
from tests.inference_svc.bench.test_trace import SAMPLE
from tests.recorded_graph import RecordedGraphs
from tests.split_attention import attend_pages

CHOICE = ModelChoice(random="4x256", layers=2, threads=1)
PAIRS = 1


@pytest.fixture(autouse=True)
def small_floors(monkeypatch):
    """Shorten the measurement of the machine's floors, and the number of tokens."""
    monkeypatch.setitem(PRESETS, "4x256", replace(PRESETS["4x256"], vocab=512))
    monkeypatch.setattr(prefill, "MATRIX_SIDE", 64)
    monkeypatch.setattr(decode, "BUFFER_BYTES", 1 << 20)


@pytest.fixture
def measure(tmp_path, forked_children):
    said = []

    def measured(part):
        report = run(part, CHOICE, RunOptions(tmp_path, on_progress=said.append))
        assert said
        assert not list(tmp_path.iterdir())  # all of its files are removed
        return report

    return measured


def variants(case):
    return {found.variant: found for found in case.variants}


def test_turns_are_measured_recomputed_from_dram_and_resident(measure):
    """Every counted measurement had its history in the tier of its case."""
    report = measure(
        TurnsOptions(((100, 30),), (200,), 30, pairs=PAIRS, answer_tokens=2, re_max_tokens=150)
    )
    short, long = report.cases
    assert {name: found.num for name, found in variants(short).items()} == {
        "re": PAIRS,
        "ca": PAIRS,
        "resident": PAIRS,
    }
    assert set(variants(long)) == {"ca", "resident"}  # too long to be recomputed
    assert [ratio.what for ratio in short.ratios] == ["ca / resident", "re / ca"]
    assert all(set(found.values) >= {"ttft_s", "tpot_s"} for found in short.variants)


@pytest.mark.long
def test_turns_are_measured_with_their_history_on_ssd(measure):
    """It leaves DRAM before each turn; with and without time to read ahead."""
    report = measure(TurnsOptions(((160, 30),), (), tier="ssd", pairs=PAIRS, answer_tokens=2))
    idle, queued = map(variants, report.cases)
    assert set(idle) == {"auto", "always", "never", "resident"}
    assert set(queued) == {"ssd", "dram", "resident"}
    assert all(found.num for found in (*idle.values(), *queued.values()))


def test_overlap_compares_read_buffers_and_ways_to_save(measure):
    """One engine for each setting, all on one kvd."""
    report = measure(
        OverlapOptions(160, 30, (0, -1), (40, 60), answer_tokens=3, batch=2, pairs=PAIRS)
    )
    preload, saving = map(variants, report.cases)
    assert set(preload) == {"none", "B0", "auto", "resident"}
    assert set(saving) == {"off", "async", "sync"}
    assert all(found.num for found in (*preload.values(), *saving.values()))


@pytest.mark.long
def test_read_buffers_are_compared_with_the_start_gates_choice(measure):
    """Every size; the setting is the buffer that a turn starts with, and loads take their time."""
    report = measure(BuffersOptions(160, 30, (15.0,), layer_ms=1.0, pairs=PAIRS))
    (case,) = report.cases
    found = variants(case)
    assert set(found) == {"auto", "B0", "B1", "B2"}
    assert all(each.num == PAIRS for each in found.values())
    sizes = {name: each.values["buffer_layers"].median for name, each in found.items()}
    assert [sizes[f"B{size}"] for size in range(3)] == [0, 1, 2]
    # of two layers, which load much more slowly than they are computed
    assert 1 < sizes["auto"] <= 2
    assert {ratio.metric for ratio in case.ratios} == {"ttft_s", "queued_s"}
    (note,) = case.notes
    assert "of 2 layers" in note


def test_prefill_is_compared_with_the_stock_model_and_with_the_matrix_rate(measure):
    """Every length separately."""
    report = measure(PrefillOptions((20, 70), pairs=PAIRS))
    assert [case.facts["prompt_tokens"] for case in report.cases] == [20, 70]
    for case in report.cases:
        assert set(variants(case)) == {"ours", "stock", "floor"}
        assert [ratio.what for ratio in case.ratios] == ["ours / stock", "ours / floor"]
    few, more = (case.facts["operations"] for case in report.cases)
    assert 3.5 < more / few < 5  # attention grows faster than linear layers


def test_copies_are_compared_with_plain_ones(measure):
    """Loads, also by torch, saves and both at once; no goal where the CPU embeds the keys."""
    report = measure(CopiesOptions((40, 130), pairs=PAIRS))
    assert [case.name for case in report.cases] == ["40 tokens", "130 tokens"]
    for case in report.cases:
        ways = ("load", "save", "both")
        floors = {f"{way} floor" for way in ways}
        assert set(variants(case)) == {*ways, *floors, "load by torch"}
        ratios = [f"{way} / {way} floor" for way in ways]
        ratios.insert(1, "load / load by torch")
        assert [ratio.what for ratio in case.ratios] == ratios
        assert not any(ratio.at_least for ratio in case.ratios)


def test_copying_through_a_copier_needs_a_gpu(measure):
    """No other part is measured under its name."""
    parts = (
        CopiesOptions((40,), pairs=PAIRS, transport="cuda_ipc"),
        TurnsOptions(((100, 30),), pairs=PAIRS, transport="cuda_ipc"),
        TurnsOptions(((100, 30),), tier="ssd", pairs=PAIRS, transport="cuda_ipc"),
    )
    for part in parts:
        with pytest.raises(
            CopierNotReadyError, match="there is no copier for cpu: measure with --transp"
        ):
            measure(part)


def test_copies_through_a_copier_are_compared_too(measure, monkeypatch):
    """With a kvd whose copier runs over a stand-in for a GPU."""
    for name, value in fake_cuda().items():
        monkeypatch.setenv(name, value)

    def open_arena_by_copier(device, client, counters):
        link = CopierLink(HostDriver(), GPUS[0], counters, 1 << 16)
        client.run_while_attached.append(link.run)
        return partial(CopierArena, driver=HostDriver(), device=device, link=link)

    monkeypatch.setattr(copied_slots, "open_arena_by_copier", open_arena_by_copier)
    report = measure(CopiesOptions((130,), pairs=PAIRS, transport="cuda_ipc"))
    assert {"load", "load floor"} < set(variants(report.cases[0]))


def test_serve_replays_a_trace_with_and_without_reuse(measure):
    """Every token of the history is either found in a tier or recomputed."""
    report = measure(
        ServeOptions(SAMPLE, 4, 2, scale=0.05, think_scale=0.0, variants=("ca", "kvd", "re"))
    )
    found = {
        name: {
            place: each.values[f"{place}_share"].median
            for place in ("hbm", "dram", "ssd", "recomputed")
        }
        for name, each in variants(report.cases[0]).items()
    }
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in found.values())
    assert found["re"]["recomputed"] == 1.0
    assert found["ca"]["hbm"] == 1.0
    assert found["kvd"]["hbm"] == 0.0  # so short a history may well be computed again


def test_an_overflow_is_compared_with_the_turn_that_fits_and_with_half_the_history(measure):
    """In both tiers every turn had the rest of its history where the case says."""
    report = measure(OverflowOptions(130, 20, answer_tokens=2, pairs=PAIRS))
    for case in report.cases:
        assert {name: found.num for name, found in variants(case).items()} == {
            "fits": PAIRS,
            "overflow": PAIRS,
            "half": PAIRS,
        }
        assert [ratio.what for ratio in case.ratios] == ["overflow / fits", "overflow / half"]
    assert [case.name.split(", ")[1] for case in report.cases] == ["dram", "hbm"]


def test_sessions_with_a_common_prompt_are_compared_on_pages_and_side_by_side(measure):
    """On pages the prompt is stored once; every measured turn had it from memory."""
    options = SharingOptions(
        num_sessions=3,
        num_at_once=2,
        prompt_tokens=64,
        new_tokens=20,
        answer_tokens=2,
        pairs=PAIRS,
    )
    case, at_once = measure(options).cases
    names = ("pages", "pages floor", "copied", "copied floor")
    for found in (case, at_once):
        assert {n: one.num for n, one in variants(found).items()} == dict.fromkeys(names, PAIRS)
    assert case.facts["pages_bytes"] < 0.7 * case.facts["copied_bytes"]
    assert [ratio.what for ratio in case.ratios] == [
        "pages / pages floor",
        "copied / copied floor",
        "pages / copied",
    ]
    assert [ratio.what for ratio in at_once.ratios] == [
        "pages / pages floor",
        "copied / copied floor",
    ]


def test_coupled_positions_lose_the_turns_that_overflow(measure, tmp_path_factory):
    """With room for everything CA hits each turn with history; OF does not after overflows."""
    trace = tmp_path_factory.mktemp("plan") / "trace.jsonl"
    report = measure(PositionsOptions(SAMPLE, 6, scale=0.1, window_tokens=128, plan_trace=trace))
    (case,) = report.cases
    assert case.facts["overflows"] > 0
    found = {name: measured.values for name, measured in variants(case).items()}
    assert found["ca"]["fu_share"].median == 1.0
    assert found["of"]["fu_share"].median < 1.0
    turns = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(turns) == case.facts["turns"]
    assert max(t["history_tokens"] + t["new_tokens"] + t["output_tokens"] for t in turns) <= 128


def test_decode_is_compared_with_generate_and_with_the_memory(measure):
    """Eight sequences at once are also compared with eight one after another."""
    report = measure(DecodeOptions((1, 8), history_tokens=20, steps=6, pairs=PAIRS))
    alone, eight = map(variants, report.cases)
    assert set(alone) == {"ours", "generate", "floor"}
    assert set(eight) == {"ours", "generate", "floor", "sequential"}
    assert all(found.values["tokens_per_s"].low > 0 for found in eight.values())


def test_drafts_are_compared_with_none(measure):
    """By traffic and batch; without a tokenizer both have random tokens."""
    report = measure(DraftsOptions((1, 2), history_tokens=20, steps=12, pairs=PAIRS))
    assert [case.name for case in report.cases] == [
        *("copy, batch 1", "copy, batch 2", "chat, batch 1", "chat, batch 2")
    ]
    for case in report.cases:
        found = variants(case)
        assert set(found) == {"drafted", "plain"}
        assert found["plain"].values["drafted_tokens"].high == 0
        assert found["drafted"].values["tokens_per_s"].low > 0
        assert [ratio.what for ratio in case.ratios] == ["drafted / plain"]


@pytest.mark.long
def test_replayed_steps_are_compared_with_computed_ones(measure, monkeypatch):
    """On the same engine, where it replays any."""
    capture = RecordedGraphs()
    monkeypatch.setattr(assembly, "capture_on", lambda _device: capture)
    monkeypatch.setattr(assembly, "choose_attention", lambda *_: PagedAttention(attend_pages))
    run = decode.running_engine

    def on_pages(*args, scheduler, **options):
        return run(*args, scheduler={**scheduler, "working_kv": "pages"}, **options)

    monkeypatch.setattr(decode, "running_engine", on_pages)
    (case,) = measure(DecodeOptions((2,), history_tokens=20, steps=6, pairs=1)).cases
    assert {"ours", "computed"} <= set(variants(case))
    assert [ratio.what for ratio in case.ratios] == [
        "ours / generate",
        "ours / computed",
        "ours / floor",
    ]
    # Each of 2 rounds, one of them to warm up, has 6 steps; the proof has 2 of each shape.
    assert capture.num_replayed == 2 * capture.num_captured + 2 * 6


def test_the_command_writes_a_document(tmp_path, capsys, monkeypatch):
    """Progress goes to stderr, `--json -` to stdout, which has no other output."""
    arguments = "bench decode --random 4x256 --layers 1 --threads 1 --batches 1 --history 8"
    arguments += f" --steps 3 --pairs 1 --json - --directory {tmp_path}"
    monkeypatch.setattr("sys.argv", ["inference-svc", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["part"] == "decode"
    assert "measuring" in printed.err


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("turns --random none", "no preset"),
        ("turns", "--random PRESET"),
        ("turns --random 4x256 --splits x", "not a list of splits"),
        ("turns --random 4x256 --splits ,", "nothing to measure"),
        ("turns --random 4x256 --tier tape", "no such tier"),
        ("overlap --random 4x256 --only half", "no such half"),
        ("buffers --random 4x256 --ratios x", "not a list of ratios"),
        ("buffers --random 4x256 --ratios 0", "is not above 0"),
        ("buffers --random 4x256 --ratios ,", "nothing to measure"),
        ("serve --random 4x256 --variants ca,of", "no such variants"),
        ("policies --random 4x256 --policies ,", "nothing to measure"),
        ("policies --random 4x256 --layers 1 --policies none", "not an eviction policy"),
        ("decode --random 4x256 --dtype int4", "no such dtype"),
        ("serve --random 4x256 --layers 1 --trace /dev/null", "contains no turn"),
        ("decode --random 4x256 --layers 1 --directory /nowhere", "cannot write"),
    ],
)
def test_unmeasurable_options_are_refused_in_one_line(arguments, what, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["inference-svc", "bench", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("inference-svc:")
    assert what in last
