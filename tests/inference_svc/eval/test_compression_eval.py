"""The report of `inference-svc eval compression` on the tiny model."""

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn import functional

from inference_svc.core.errors import InvalidCompressionError
from inference_svc.eval.compression_eval import measure_compression
from inference_svc.eval.eval_model import UnusableTextError, load_text, prepare_model
from inference_svc.eval.figures import EvalReport
from inference_svc.eval.options import CompressionOptions, ratios_of
from inference_svc.eval.report import plot, tables
from inference_svc.eval.runner import subject_of
from inference_svc.eval.sequence import Sequence
from inference_svc.runtime.model.model_loader import load_model
from shared.types.errors import InvalidInputError
from tests.oracle import Oracle

TEXT = Path(__file__).parents[2] / "data" / "wikitext2_sample.txt.gz"
OPTIONS = CompressionOptions(
    TEXT,
    ("sinks_recent", "snapkv", "h2o"),
    (1.0, 0.5),
    num_contexts=2,
    context_tokens=420,
    next_tokens=40,
    num_questions=1,
)


@pytest.fixture(scope="module")
def model(tiny_model):
    return prepare_model(load_model(tiny_model), 512, ("ca",))


@pytest.fixture(scope="module")
def report(model):
    said = []
    found = measure_compression(model, OPTIONS, said.append)
    assert said == ["context 1/2", "context 2/2"]
    return found


def test_each_policy_is_measured_at_each_ratio(report):
    """The whole context comes first; every policy keeps its ratio."""
    rows = [(row.policy, row.keep_ratio) for row in report.rows]
    assert rows == [("none", 1.0), ("sinks_recent", 0.5), ("snapkv", 0.5), ("h2o", 0.5)]
    assert report.rows[0].kept == 1
    assert report.rows[0].to_whole.value == 1
    assert all(row.kept == pytest.approx(0.5, abs=0.01) for row in report.rows[1:])
    assert report.num_asked == 2


def test_the_whole_context_predicts_as_the_stock_model_does(model, report, tiny_model):
    """Losses behind it are those of one plain forward over context and text."""
    token_ids = load_text(TEXT, model).token_ids
    stock = Oracle(tiny_model)._model
    losses = []
    for index in range(2):
        begin = 1 + index * 460
        ids = [token_ids[0], *token_ids[begin : begin + 460]]
        with torch.no_grad():
            logits = stock(torch.tensor([ids])).logits[0, 420:-1]
        losses.append(functional.cross_entropy(logits, torch.tensor(ids[421:])))
    nats = float(sum(losses)) / 2
    assert report.rows[0].next_tokens.nats_per_token == pytest.approx(nats, abs=1e-4)
    assert report.rows[0].next_tokens.per_token == pytest.approx(math.exp(nats), rel=1e-3)


def test_a_copy_is_independent(model):
    """Its logits are the original's, which a discard in the copy does not affect."""
    ids = list(load_text(TEXT, model).token_ids[:60])
    with Sequence(model, "ca") as whole, Sequence(model, "ca") as copy:
        whole.feed(ids[:50], want="none")
        copy.copy_from(whole)
        copy.discard([(5, 20)])
        copy.copy_from(whole)
        assert copy.context_ids == whole.context_ids
        torch.testing.assert_close(copy.feed(ids[50:]), whole.feed(ids[50:]))


def test_the_table_has_a_row_for_each_policy(model, report):
    """Every figure of a policy stands in its row."""
    console = Console(file=StringIO(), width=160)
    for table in tables(EvalReport("compression", (), 1.0, subject_of(model), report), 160):
        console.print(table)
    shown = console.file.getvalue()
    for row in report.rows:
        (line,) = [line for line in shown.splitlines() if line.split()[:1] == [row.policy]]
        assert f"{row.kept:.1%}" in line
        assert f"{row.next_tokens.per_token:.2f}" in line


def test_ratios_are_read():
    """Anything else is refused with an example."""
    assert ratios_of("0.5,0.25") == (0.5, 0.25)
    with pytest.raises(InvalidInputError, match=r"write it as"):
        ratios_of("half")


def test_the_picture_is_drawn(report, tmp_path):
    """One line per policy, in a file of the format given by its name."""
    plot(report, "tiny", tmp_path / "compression.svg")
    assert "<svg" in (tmp_path / "compression.svg").read_text()


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"policies": ("zip",)}, InvalidCompressionError, "no compression policy 'zip'"),
        ({"ratios": (2.0,)}, InvalidCompressionError, "keep_ratio 2 "),
        ({"context_tokens": 490}, InvalidInputError, "exceed the window of 512"),
        ({"num_contexts": 10**6}, UnusableTextError, "give a longer text"),
    ],
)
def test_impossible_measurements_are_refused(model, changed, error, said):
    """Before any computation, with the value and a remedy."""
    with pytest.raises(error, match=said):
        measure_compression(model, replace(OPTIONS, **changed), print)
