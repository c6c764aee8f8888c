"""The document for scripts, the tables for people, and the picture."""

import json
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from inference_svc.bench.figures import (
    SCHEMA,
    Case,
    Machine,
    Measured,
    Ratio,
    Report,
    Subject,
    as_document,
)
from inference_svc.bench.option_types import splits_of
from inference_svc.bench.report import plot, tables
from shared.measuring.options import BadListError, numbers
from shared.measuring.plots import NoPlotError, check_plot
from shared.measuring.statistics import Spread

TTFT = Spread(0.04, 0.05, 0.07)
CA = Measured("ca", 15, 2, {"ttft_s": TTFT, "prefill_tokens_per_s": Spread(1e4, 2e4, 3e4)})
FLOOR = Measured("resident", 15, 0, {"ttft_s": Spread(0.04, 0.04, 0.05)})
RATIOS = (
    Ratio("ca / resident", "ttft_s", 15, Spread(1.0, 1.05, 1.2), at_most=1.1),
    Ratio("re / ca", "ttft_s", 15, Spread(5.0, 6.0, 7.0), at_least=8.0),
    Ratio("always / resident", "ttft_s", 15, Spread(2.0, 2.0, 2.0)),
)
CASE = Case("900/100", {"history_tokens": 896, "new_tokens": 104}, (CA, FLOOR), RATIOS)
REPORT = Report(
    part="turns",
    metric="ttft_s",
    command=("inference-svc", "bench", "turns"),
    started_unix_s=1.0,
    elapsed_s=12.0,
    subject=Subject("4x256", "Llama", True, 4, 7_000_000, "float32", "cpu", 1, "ragged", 8192, 32),
    machine=Machine(
        "a processor", 2, 0.1, 1 << 34, "madvise", "6.1", "", "3.11", "0.1", {"t": "2"}
    ),
    cases=(CASE,),
)


def render(report):
    console = Console(width=160, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    for table in tables(report, 160):
        console.print(table)
    return console.export_text()


def test_the_document_is_json_and_says_which_goals_are_met():
    document = json.loads(json.dumps(as_document(REPORT)))
    assert document["schema"] == SCHEMA
    assert document["cases"][0]["variants"][0]["values"]["ttft_s"]["median"] == 0.05
    assert [(goal["what"], goal["met"]) for goal in document["goals"]] == [
        ("ca / resident", True),
        ("re / ca", False),
    ]


def test_the_tables_show_medians_discarded_measurements_and_missed_goals():
    text = render(REPORT)
    for part in ("900/100", "50.0 ms", "20,000", "15 (-2)", "<= 1.1", "met", ">= 8", "MISSED"):
        assert part in text
    assert "accelerator" not in text


def test_a_case_with_many_metrics_has_a_row_for_each():
    many = Measured("ca", 1, 0, {f"ttft_p{n}_s": TTFT for n in range(9)} | {"hbm_share": TTFT})
    text = render(replace(REPORT, cases=(replace(CASE, variants=(many,)),)))
    assert "ttft p8" in text
    assert "5.0%" in text


def test_the_accelerator_is_named_where_there_is_one():
    machine = replace(REPORT.machine, accelerator="a device")
    assert "a device" in render(replace(REPORT, machine=machine))


def test_a_picture_is_written(tmp_path):
    empty = replace(CASE, name="nothing", variants=(), ratios=())
    plot(replace(REPORT, cases=(CASE, empty)), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_known_format_is_refused(tmp_path):
    with pytest.raises(NoPlotError, match=r"\.png"):
        plot(REPORT, tmp_path / "out.nonsense")


def test_without_matplotlib_the_remedy_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    with pytest.raises(NoPlotError, match=r"cachedattention\[bench\]"):
        check_plot(tmp_path / "out.png")


def test_a_picture_needs_a_directory_that_is_there(tmp_path):
    with pytest.raises(NoPlotError, match="does not exist"):
        check_plot(tmp_path / "none" / "out.png")


def test_lists_are_read_from_the_command_line():
    assert numbers("1, 8,24,") == (1, 8, 24)
    assert numbers("-1,0", least=-1) == (-1, 0)
    assert numbers("") == ()
    assert splits_of("500/500,900/100") == ((500, 500), (900, 100))
    assert splits_of("") == ()


@pytest.mark.parametrize("text", ["1;2", "a", "1/2", "0", "8,-1"])
def test_invalid_lists_of_numbers_are_refused(text):
    with pytest.raises(BadListError):
        numbers(text)


@pytest.mark.parametrize("text", ["500", "1/2/3", "a/b", "0/5", "5/-1"])
def test_invalid_lists_of_splits_are_refused(text):
    with pytest.raises(BadListError):
        splits_of(text)
