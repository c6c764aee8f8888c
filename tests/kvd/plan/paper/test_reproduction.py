"""kvd plan --paper on small samples."""

import json

import pytest
from rich.console import Console

from kvd.plan.paper.numbers import LLAMA_13B, LLAMA_65B
from kvd.plan.paper.reproduction import Reproduction, all_runs
from kvd.plan.paper.runs import (
    LETTER_POLICY,
    QUICK_SCALE,
    RECOMPUTE,
    SMALL_SSD_BYTES,
    Run,
    Sample,
    cell_of,
    sessions_of,
)
from kvd.plan.paper.tables import PaperReport, Row, paper_tables
from kvd.plan.sweep import run_cells
from tests.kvd.plan.paper.conftest import TINY


def test_every_figure_is_present(report: PaperReport) -> None:
    """Figures 13 to 17 and 21 to 25, and the preprint's own 23 and 24."""
    summary, *tables = report.tables
    assert summary.figure == "Summary"
    figures = [table.figure.removeprefix("Figure ") for table in tables]
    assert [figure[:2] for figure in figures] == [
        *("13", "14", "15", "16", "17"),
        *("21", "22", "23", "24", "25"),
        *("23", "24"),
    ]
    assert figures[-2:] == ["23 of the preprint", "24 of the preprint"]
    assert all(table.rows and table.notes for table in report.tables)
    assert report.num_replays == len(all_runs()) == len(set(all_runs()))


def test_the_summary_has_the_best_of_the_models(report: PaperReport) -> None:
    """Of TTFT, prefill throughput and cost, as in Figures 14, 15 and 17."""
    summary, *_ = report.tables
    by_figure = {table.figure: table for table in report.tables}
    for row, figure in zip(summary.rows, ("Figure 14", "Figure 15", "Figure 17"), strict=True):
        rows = by_figure[figure].rows[:4]
        assert all("llama" in row.label or "falcon" in row.label for row in rows)
        assert row.planned == max(row.planned for row in rows)
        assert row.paper is not None
        assert row.paper.value == max(row.paper.value for row in rows if row.paper is not None)


def test_no_number_is_invented(report: PaperReport) -> None:
    """A value that the text does not state has no number and no difference; the rest has both."""
    rows = [row for table in report.tables for row in table.rows]
    assert any(row.paper is None and row.preprint is None for row in rows)
    for row in rows:
        is_stated = row.paper is not None or row.preprint is not None
        assert (row.difference is not None) == is_stated
    assert Row("", "s", 1.0).as_dict()["difference"] is None


def test_tables_and_document_have_the_same_rows(report: PaperReport) -> None:
    """Every row is in both."""
    document = json.loads(json.dumps(report.as_dict()))
    assert [len(table["rows"]) for table in document["tables"]] == [
        len(table.rows) for table in report.tables
    ]
    console = Console(width=200)
    with console.capture() as captured:
        for table in paper_tables(report):
            console.print(table)
    text = captured.get()
    for table in report.tables:
        assert table.figure in text
        assert all(row.label in text for row in table.rows)


@pytest.mark.long
def test_equal_seeds_give_equal_reports(report: PaperReport) -> None:
    """Whoever replays it."""
    assert Reproduction(TINY).make(2, lambda _: None) == report


def test_the_papers_ranking() -> None:
    """On a twentieth of the sessions: RE < LRU < L_ew to the letter < CA, and OF below CA."""
    sample = Sample(seed=7, scale=QUICK_SCALE)
    small = [
        Run(policy=policy, ssd_bytes=SMALL_SSD_BYTES)
        for policy in (RECOMPUTE, "lru", LETTER_POLICY, "lookahead_queue")
    ]
    cells = [cell_of(run, sample) for run in (*small, Run())]
    *of_small, large = run_cells(sessions_of(Run().workload, sample), cells, 1, lambda _: None)
    hits = [outcome.hits_all for outcome in of_small]
    assert hits == sorted(hits)
    assert hits[0] == 0
    assert hits[1] + 0.15 < hits[3] < large.hits_all
    assert large.hits_all == pytest.approx(0.86, abs=0.03)
    coupled = Run(overflow="turn")
    (of_coupled,) = run_cells(
        sessions_of(coupled.workload, sample), [cell_of(coupled, sample)], 1, lambda _: None
    )
    assert of_coupled.hits_all < large.hits_all - 0.1


def test_models_differ_by_the_size_of_their_kv() -> None:
    """LLaMA-65B's sessions are the largest, and have the fewest hits."""
    sample = Sample(seed=7, scale=QUICK_SCALE)
    hits = {}
    for model in (LLAMA_13B, LLAMA_65B):
        run = Run(model=model)
        (outcome,) = run_cells(
            sessions_of(run.workload, sample), [cell_of(run, sample)], 1, lambda _: None
        )
        hits[model] = outcome.hits_fu
    assert hits[LLAMA_65B] + 0.05 < hits[LLAMA_13B]
