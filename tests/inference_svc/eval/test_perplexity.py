"""Every method equals a simple computation, on a real text with a small window."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.eval.eval_model import load_text, prepare_model
from inference_svc.eval.options import PerplexityOptions, Truncation, with_sinks
from inference_svc.eval.perplexity import measure_perplexity, perplexity_of, ratio_of, stream
from inference_svc.eval.sequence import Sequence
from inference_svc.runtime.model.model_loader import load_model
from shared.types.errors import InvalidInputError
from tests.inference_svc.eval.conftest import WINDOW
from tests.inference_svc.eval.plain_stream import keep_rows, recompute

SAMPLE = Path(__file__).parents[2] / "data" / "wikitext2_sample.txt.gz"
DROP = WINDOW // 2
NUM_TOKENS = 3 * WINDOW + 11
SAME = 2e-4  # nats per token, of 6 to 12


@pytest.fixture(scope="module")
def stock(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def token_ids(eval_model):
    return list(load_text(SAMPLE, eval_model, 120).token_ids[:NUM_TOKENS])


def stream_tokens(model, method, token_ids, truncation=Truncation()):  # noqa: B008 - frozen
    with Sequence(model, method) as context:
        return stream(context, token_ids, truncation)


def farthest(losses, others):
    return float((losses - others).abs().max())


def test_token_truncation_equals_a_stock_forward_over_the_rest(eval_model, stock, token_ids):
    """Each window's losses are those of one plain forward."""
    found = stream_tokens(eval_model, "tt", token_ids)
    assert len(found.losses) == NUM_TOKENS - 1
    assert farthest(found.losses, recompute(stock, token_ids, WINDOW, DROP)) < SAME


@pytest.mark.parametrize("method", ["ca", "ca-shift"])
def test_kept_rows_equal_the_plain_formula(eval_model, stock, token_ids, method):
    """From before RoPE or rotated in place: keys are rotated by the length of the drop."""
    found = stream_tokens(eval_model, method, token_ids)
    expected = keep_rows(stock, token_ids, WINDOW, DROP, turned=True)
    assert farthest(found.losses, expected) < SAME
    assert farthest(found.losses, recompute(stock, token_ids, WINDOW, DROP)) > 100 * SAME


def test_naive_truncation_keeps_old_positions(eval_model, stock, token_ids):
    """Rows do not change; the first window is right, later ones differ."""
    found = stream_tokens(eval_model, "nkvt", token_ids)
    assert farthest(found.losses, keep_rows(stock, token_ids, WINDOW, DROP, turned=False)) < SAME
    right = stream_tokens(eval_model, "ca", token_ids)
    assert farthest(found.losses[:WINDOW], right.losses[:WINDOW]) < SAME
    assert farthest(found.losses[WINDOW:], right.losses[WINDOW:]) > 100 * SAME


def test_only_recomputing_methods_compute_tokens_twice(eval_model, token_ids):
    """Tokens before the first dropped one are valid with coupled positions, too."""
    truncation = Truncation(sink_tokens=4)
    found = {
        method: stream_tokens(eval_model, method, token_ids, truncation)
        for method in ("ca", "ca-shift", "tt", "of", "nkvt")
    }
    once, again = NUM_TOKENS - 1, found["tt"].num_overflows * (WINDOW - DROP)
    assert again
    assert found["ca"].num_computed == found["ca-shift"].num_computed == once
    assert found["nkvt"].num_computed == once
    assert found["tt"].num_computed == once + again
    assert found["of"].num_computed == once + again - 4 * found["of"].num_overflows
    assert farthest(found["of"].losses, found["tt"].losses) < SAME


def test_sinks_stay(eval_model, stock, token_ids):
    """The oldest tokens after them are dropped."""
    found = stream_tokens(eval_model, "tt", token_ids, Truncation(0.25, 3))
    assert farthest(found.losses, recompute(stock, token_ids, WINDOW, WINDOW // 4, 3)) < SAME


def test_a_report_compares_every_method_with_token_truncation(eval_model):
    """Words are those of the text; the first window counts for the whole, not for the rest."""
    options = PerplexityOptions(SAMPLE, ("ca", "tt", "nkvt"), num_words=120)
    report = measure_perplexity(eval_model, options, lambda _what: None)
    ca, tt, nkvt = report.methods
    assert (report.num_words, report.window_tokens) == (120, WINDOW)
    assert tt.to_reference.value == 1
    ratio = ca.all_tokens.per_word / tt.all_tokens.per_word
    assert ca.to_reference.value == pytest.approx(ratio)
    assert ca.to_reference.low < ca.to_reference.value < ca.to_reference.high
    assert ca.num_overflows == nkvt.num_overflows == (report.num_tokens - WINDOW - 1) // DROP + 1
    assert tt.after_overflow != tt.all_tokens


def test_the_reference_may_drop_another_part(eval_model):
    """Kept rows allow small drops; token truncation recomputes for each drop."""

    def measured(truncation, reference_ratio=None):
        options = PerplexityOptions(SAMPLE, ("ca", "tt"), truncation, 120, reference_ratio)
        return measure_perplexity(eval_model, options, lambda _what: None)

    report, alike = measured(Truncation(0.125), 0.5), measured(Truncation(0.5))
    ca, tt = report.methods
    assert (report.truncation.ratio, report.reference_ratio) == (0.125, 0.5)
    assert alike.reference_ratio == 0.5
    assert ca.num_overflows > tt.num_overflows
    assert ca.num_computed == report.num_tokens < tt.num_computed
    assert tt.all_tokens == alike.methods[1].all_tokens
    assert ca.all_tokens != alike.methods[0].all_tokens
    with pytest.raises(InvalidInputError, match="a truncation that drops 1 of the window"):
        measured(Truncation(0.125), 1.0)


def test_a_model_with_an_attention_sink_needs_it(sink_model):
    """The loss of a text that it generated is high without that token, and low with it."""
    model = prepare_model(load_model(sink_model), 256, ("ca", "tt"))
    as_served = with_sinks(Truncation(), model.sink_tokens)
    assert as_served == Truncation(sink_tokens=USUAL_SINKS)
    torch.manual_seed(1)
    bos_id = model.loaded.tokenizer.bos_token_id
    text = AutoModelForCausalLM.from_pretrained(sink_model).generate(
        torch.tensor([[bos_id]]), do_sample=True, top_k=0, max_new_tokens=600, eos_token_id=None
    )
    nats = {
        truncation.sink_tokens: float(
            stream_tokens(model, "ca", text[0].tolist(), truncation).losses[256:].mean()
        )
        for truncation in (as_served, *(Truncation(sink_tokens=number) for number in (0, 1, 16)))
    }
    assert nats[0] > nats[USUAL_SINKS] + 2
    assert nats[1] == pytest.approx(nats[USUAL_SINKS], abs=0.2)
    assert nats[16] == pytest.approx(nats[USUAL_SINKS], abs=0.2)


def test_a_report_has_the_number_of_sinks(eval_model):
    """The configured ones, else the model's; later tokens are counted separately."""
    found = {}
    for asked in (None, 0):
        options = PerplexityOptions(SAMPLE, ("ca", "tt"), Truncation(sink_tokens=asked), 120)
        found[asked] = measure_perplexity(eval_model, options, lambda _what: None)
    assert found[None].truncation.sink_tokens == eval_model.sink_tokens == USUAL_SINKS
    assert found[0].truncation.sink_tokens == 0
    ca, tt = found[None].methods
    after = ca.after_overflow.per_word / tt.after_overflow.per_word
    assert ca.after_to_reference.value == pytest.approx(after)
    assert ca.after_to_reference != ca.to_reference
    assert tt.after_to_reference.value == 1


def test_too_few_tokens_after_the_first_overflow_are_not_compared(eval_model, tmp_path):
    """They are fewer than one truncation drops; the whole text is compared all the same."""
    tokenizer = eval_model.loaded.tokenizer
    text = load_text(SAMPLE, eval_model, 120)
    short = tmp_path / "short.txt"
    short.write_text(tokenizer.decode(text.token_ids[: WINDOW + DROP // 2]))
    options = PerplexityOptions(short, ("ca", "tt"))
    ca, _ = measure_perplexity(eval_model, options, lambda _what: None).methods
    assert ca.num_overflows == 1
    assert ca.after_to_reference is None
    assert ca.to_reference is not None


def test_figures_of_a_loss():
    """A loss of ln 8 a token, two tokens a word."""
    found = perplexity_of(torch.full((6,), 8.0).double().log(), 2.0)
    assert found.per_token == pytest.approx(8)
    assert found.per_word == pytest.approx(64)


def test_a_confidence_interval_contains_the_ratio():
    """Equal pieces give an empty one; a text of one piece gives an unlimited one."""
    reference = torch.zeros(8).double()
    same = ratio_of(reference + 0.1, reference, 1.0, 2)
    assert same.low == pytest.approx(same.high)
    assert same.value == pytest.approx(1.10517, rel=1e-5)
    wild = ratio_of(torch.tensor([0.0, 0.2, 0.0, 0.2]).double(), reference[:4], 1.0, 4)
    assert wild.low == 0
    assert wild.high > 1e300


def test_a_model_of_absolute_positions_is_measured_by_the_other_methods(absolute_model):
    """Its naive truncation also differs from recomputing: positions are in its rows."""
    model = prepare_model(load_model(absolute_model), 40, ("tt", "of", "nkvt"))
    token_ids = [(5 * i + i * i) % 60 for i in range(100)]
    tt, of, nkvt = (stream_tokens(model, method, token_ids) for method in ("tt", "of", "nkvt"))
    assert farthest(tt.losses, of.losses) == 0
    assert farthest(tt.losses[40:], nkvt.losses[40:]) > SAME
