"""The report of `inference-svc eval edits`, against plain forwards and formulas."""

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from torch.nn import functional
from transformers import DynamicCache

from inference_svc.eval.edits import (
    EXACT,
    KINDS,
    Edit,
    Replacement,
    Writer,
    draw_edit,
    modes_of,
)
from inference_svc.eval.edits_eval import measure_edits
from inference_svc.eval.eval_model import UnusableTextError, load_text, prepare_model
from inference_svc.eval.figures import EvalReport
from inference_svc.eval.options import EditsOptions
from inference_svc.eval.report import tables
from inference_svc.eval.runner import subject_of
from inference_svc.eval.sequence import Sequence
from inference_svc.runtime.model.model_loader import load_model
from shared.types.errors import InvalidInputError
from tests.inference_svc.eval.plain_stream import turn
from tests.oracle import Oracle

TEXT = Path(__file__).parents[2] / "data" / "wikitext2_sample.txt.gz"
OPTIONS = EditsOptions(
    TEXT,
    modes=modes_of("keep,heal:8,heal:999,naive"),
    num_contexts=2,
    context_tokens=900,
    next_tokens=20,
)
SAME = 1e-4  # of logits of about 10: to 1e-5
TURNED = 5e-4  # by the formula, whose angles are float64
NEXT = [(11 * i + 5) % 256 for i in range(10)]
HOLES = Edit(
    (Replacement((20, 31), [9, 8, 7]), Replacement((50, 52), ()), Replacement((70, 71), [4] * 20))
)


@pytest.fixture(scope="module")
def model(tiny_model):
    return prepare_model(load_model(tiny_model), 1100, ("ca",))


@pytest.fixture(scope="module")
def stock(tiny_model):
    return Oracle(tiny_model)._model


@pytest.fixture(scope="module")
def token_ids(model):
    return list(load_text(TEXT, model).token_ids[:100])


@pytest.fixture(scope="module")
def report(model):
    said = []
    found = measure_edits(model, OPTIONS, said.append)
    assert said == ["context 1/2", "context 2/2"]
    return found


def logits_after(model, token_ids, edit, mode):
    """Return logits of NEXT behind an edited context, the context, and how much was computed."""
    with Sequence(model, "ca") as whole, Sequence(model, "ca") as context:
        whole.feed(token_ids, want="none")
        context.apply_edit(whole, edit, mode)
        ids, num_computed = list(context.context_ids), context.num_computed
        return context.feed(NEXT), ids, num_computed


@torch.no_grad()
def keep_by_formula(stock, token_ids, edit, healed=0, *, moves=True):
    """Return logits of NEXT with the stock model's cache, cut, rotated by formula, joined."""
    whole, cache, num_rows = DynamicCache(), DynamicCache(), 0
    stock(torch.tensor([token_ids]), past_key_values=whole)

    def feed(ids):
        positions = torch.arange(num_rows, num_rows + len(ids))[None]
        return stock(torch.tensor([ids]), position_ids=positions, past_key_values=cache).logits[0]

    for (start, end), new_ids in edit.runs(len(token_ids)):
        again = token_ids[start : start + healed if start else 0][: end - start]
        if again:
            feed(again)
            num_rows += len(again)
        first = start + len(again)
        for index, layer in enumerate(whole.layers):
            keys = layer.keys[:, :, first:end]
            keys = turn(stock, keys, num_rows - first) if moves else keys
            cache.update(keys, layer.values[:, :, first:end], index)
        num_rows += end - first
        if new_ids:
            feed(list(new_ids))
            num_rows += len(new_ids)
    return feed(NEXT)


def test_exact_equals_a_plain_forward(model, stock, token_ids):
    """Over the edited context."""
    logits, ids, num_computed = logits_after(model, token_ids, HOLES, EXACT)
    expected = [*token_ids[:20], 9, 8, 7, *token_ids[31:50], *token_ids[52:70], *[4] * 20]
    assert ids == [*expected, *token_ids[71:]]
    assert num_computed == len(ids) - 20
    with torch.no_grad():
        plain = stock(torch.tensor([ids + NEXT])).logits[0, -len(NEXT) :]
    torch.testing.assert_close(logits, plain, rtol=0, atol=SAME)


@pytest.mark.parametrize(("name", "healed"), [("keep", 0), ("heal:4", 4), ("heal:18", 18)])
def test_kept_rows_are_rotated_and_healed_ones_computed(model, stock, token_ids, name, healed):
    """Kept rows are the stock model's, moved by the formula; a short run is healed as a whole."""
    _, mode = modes_of(name)
    logits, ids, num_computed = logits_after(model, token_ids, HOLES, mode)
    plain = keep_by_formula(stock, token_ids, HOLES, healed)
    torch.testing.assert_close(logits, plain, rtol=0, atol=TURNED)
    assert ids == logits_after(model, token_ids, HOLES, EXACT)[1]
    assert num_computed == 23 + sum(min(healed, run) for run in (19, 18, 29))


def test_naive_keeps_old_positions(model, stock, token_ids):
    """Rows are the stock model's, not moved; keep differs from that."""
    (_, naive), (_, keep) = modes_of("naive"), modes_of("keep")
    logits, _, num_computed = logits_after(model, token_ids, HOLES, naive)
    plain = keep_by_formula(stock, token_ids, HOLES, moves=False)
    torch.testing.assert_close(logits, plain, rtol=0, atol=TURNED)
    kept, _, num_kept = logits_after(model, token_ids, HOLES, keep)
    assert num_computed == num_kept
    assert float((logits - kept).abs().max()) > 1e-2


def test_an_edit_without_changes_costs_nothing(model, token_ids):
    """Without a span, or with one replaced by itself, keep is exact."""
    _, keep = modes_of("keep")
    with Sequence(model, "ca") as context:
        context.feed(token_ids, want="none")
        untouched = context.feed(NEXT)
    empty, ids, num_computed = logits_after(model, token_ids, Edit(()), keep)
    assert torch.equal(empty, untouched)
    assert (ids, num_computed) == (token_ids, 0)
    same = Edit((Replacement((20, 31), token_ids[20:31]),))
    kept, _, num_computed = logits_after(model, token_ids, same, keep)
    assert num_computed == 11
    torch.testing.assert_close(kept, untouched, rtol=0, atol=SAME)


@pytest.mark.parametrize("name", ["heal:29", "heal:1000"])
def test_healing_everything_is_exact(model, token_ids, name):
    """No row of the old context is left."""
    _, mode = modes_of(name)
    healed, _, num_computed = logits_after(model, token_ids, HOLES, mode)
    exact, _, num_exact = logits_after(model, token_ids, HOLES, EXACT)
    assert torch.equal(healed, exact)
    assert num_computed == num_exact


def test_each_mode_is_measured_after_each_kind_of_edit(report):
    """All kinds together come last; healing everything is as good as exact."""
    modes = ("exact", "keep", "heal:8", "heal:999", "naive")
    rows = {(row.kind, row.mode): row for row in report.rows}
    assert list(rows) == [(kind, mode) for kind in (*KINDS, "all") for mode in modes]
    for kind in (*KINDS, "all"):
        exact, keep, heal, whole, naive = (rows[kind, mode] for mode in modes)
        assert exact.reused == whole.reused == 0
        assert 0 < heal.reused < keep.reused == naive.reused
        for row in (exact, whole):
            assert row.to_exact.value == 1
            assert row.divergence.value == row.old_value.value == 0
            assert row.agreement.value == 1
        assert naive.divergence.value > keep.divergence.value > 0
        assert keep.num_edits == (8 if kind == "all" else 2)
        assert (keep.brought is None) == (kind in {"clear", "delete"})


def test_exact_predicts_like_the_stock_model(model, stock, report):
    """Losses behind a deletion are those of one plain forward over the rest."""
    text = load_text(TEXT, model).token_ids
    losses = []
    for index in range(2):
        first = 1 + index * ((len(text) - 920) // 2)  # pieces overlap, because the text is short
        ids = [text[0], *text[first : first + 919]]
        rng = Random(f"delete/0/{index}")  # noqa: S311 - draws need no secrecy
        edit = draw_edit("delete", ids[:900], (), Writer(None, None), rng)
        left = [token for (start, end), _ in edit.runs(len(ids)) for token in ids[start:end]]
        with torch.no_grad():
            logits = stock(torch.tensor([left])).logits[0, -21:-1]
        losses.append(functional.cross_entropy(logits, torch.tensor(left[-20:])))
    nats = float(sum(losses)) / 2
    (row,) = (row for row in report.rows if (row.kind, row.mode) == ("delete", "exact"))
    assert row.next_tokens.nats_per_token == pytest.approx(nats, abs=1e-5)
    assert row.next_tokens.per_token == pytest.approx(math.exp(nats), rel=1e-4)


def test_the_tables_have_a_row_per_mode(model, report):
    """One of text, one of records."""
    console = Console(file=StringIO(), width=160)
    for table in tables(EvalReport("edits", (), 1.0, subject_of(model), report), 160):
        console.print(table)
    shown = console.file.getvalue()
    for row in report.rows:
        lines = [line for line in shown.splitlines() if line.split()[:2] == [row.kind, row.mode]]
        assert len(lines) == 2
        assert f"{row.to_exact.value:.4f}" in lines[0]
        assert f"{row.old_value.value:+.2f}" in lines[1]


def test_without_a_text_the_demo_is_edited(model, tmp_path):
    """Or the text of a file of conversations in ShareGPT's format."""
    few = replace(OPTIONS, text=None, num_contexts=1, kinds=("delete",), modes=(EXACT,))
    assert measure_edits(model, few, print).text == "the demo's conversations"
    path = tmp_path / "said.json"
    said = [{"from": "human", "value": "A question. " * 600}, {"from": "gpt", "value": "Yes. " * 9}]
    path.write_text(json.dumps([{"id": "1", "conversations": said}]))
    found = measure_edits(model, replace(few, conversations=path), print)
    assert found.text == "said.json"
    assert found.rows[0].num_edits == 1


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"context_tokens": 1080}, InvalidInputError, "give a smaller --context or --next"),
        ({"text": None, "conversations": Path("a.json")}, UnusableTextError, "does not exist"),
        ({"text": None, "conversations": TEXT}, UnusableTextError, "contains no conversations"),
        ({"context_tokens": 128, "text": None}, InvalidInputError, "do not fit into"),
    ],
)
def test_impossible_measurements_are_refused(model, changed, error, said):
    """With the value and a remedy."""
    with pytest.raises(error, match=said):
        measure_edits(model, replace(OPTIONS, **changed), print)


def test_a_text_that_is_too_short_is_refused(model, tmp_path):
    """There has to be twice as much of it, for replacements."""
    path = tmp_path / "short.txt"
    path.write_text("Too few words. " * 40)
    with pytest.raises(UnusableTextError, match=r"give a text of at least 1840 tokens"):
        measure_edits(model, replace(OPTIONS, text=path), print)
